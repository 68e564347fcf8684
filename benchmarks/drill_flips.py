class Spoiled:
    pass
