"""Values of trellis codes that were trained on normal weights, integers of 8 bits, see trellis.py.

Each is a fixed point of Lloyd's algorithm: from quantiles of the normal distribution in random order, a state's value
becomes the mean of the weights whose walk (the tile's nearest) goes through it. Of a few orders the best was kept; a
normal weight of standard deviation 1 is 36 here. benchmarks/trellis.py makes them and tells their errors.

Letters: L bits of a state, k bits of a step.
"""

from __future__ import annotations

import base64

import torch
from torch import Tensor

NORMAL = 36.0  # the standard deviation of normal weights in a table's units


def table(bits: int, state_bits: int) -> Tensor | None:
    """Values int8 [2**L] by state, on the CPU; None for codes whose values were not trained."""
    text = _TABLES.get((bits, state_bits))
    if text is None:
        return None
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.int8)


_TABLES = {
    (1, 8): (
        "HOYq9tUZFfAExQP8BOsORSbeHfYw6/MUBkwN49gZ/jse5SjzEA3o7gEu4+4FNf7BHvsb6MUI6iX+xi/fCP4M3tsfCdQB6OMY+Lsk8fE77BPc"
        "DLn59R6v7iLyGNoJ3BQPDN8V5yD22x0W9sgY/9XbAhDb7xYCKCXx4fIfFOIN2OPsIvJFHvDzHMAJ3TbMFNX+A/z1IvQdLODNDOUXOfDk/QMY"
        "6xv14AzUz/QIFhL9QfflD+0eNPQRvzoM6xjd/0sKDOnPHgs2Dtg88/wJLugK+gIq/cIL3e4S9S3xFSb7KvPfDuEa4i8OAAr9JdU/Bf0q3AIh"
        "+/j0yCkXDd3q4cQFGA=="
    ),
    (2, 8): (
        "ECzm+s8I7VvhxPMQ+xtOJQ/q5xAVy+HxChwt8r0z/doeBszn9hI29/3wNtYSONXyKOz+zyAK+t4G9+MfO5cR3dXyFxQlVwLlBUwZLvgDJN/8"
        "RQ/qAeATvOHsyD4h+tXyvyQHBNgB5DEVGRn2yxfwCSDW/PUB1+P/3DKlAbQc1i77DL3d8zMcBy8bze9A7getMiG8BO4PKP72/RLXa+NAGv1H"
        "GyAa5wncR8LzI+r6FtbjAzcbxvEYKBTjN8L35agQ6s8FLQYexTPxDAPYEdYt+lEGLMrU8vsaLbjyEuQNHf/f5vlFOyD1DOMCCb3/1bAeACLa"
        "RuUrBQnuEdP+Ggft8w=="
    ),
    (3, 8): (
        "AR7d9s4Q6Xb1tOcKBBo+KgfJ3QMW4vXvEx8J8sAz/uIn+tLm8wVNDgj0Lc7tQ9jiJ/L/zRoK3t786NoSNp0fxPUGACMZYxDnGUw7GQDuJtD9"
        "RB3z5tEOtdX0y0wg5LvXuC4OA+D48BoRGSb7ywvtAivd8d0J6v746De+C6Me1CfpEsTXAy4f+TgnzuJY+hO0PSulEvUXJgQL8SHdT/szFwtA"
        "IBIt4vvUX9kRO+wGAPfmB0wkyfoXMgDXNrnp8IsL3tLzLw4fxz3/DfzvGt4u7VsaMsLm+AYXILvqKPgJD/zP7eJJLD0EI+j+Gb7byq0PFDHH"
        "Qtgm7QLzBan9DBXm7w=="
    ),
    (4, 8): (
        "DuEy9kgoGgEVPeoJIdW8xvowtQP1w6ge6ybXEToW4QnTIxURxQBG8SwL+IHpBtsc8NX+6Bg53iu5xiL34DMN0FMFDQC5GOQTPfPuMwog+fwJ"
        "y/Xv/ZzVEAId3esXJ+U36MHZFiLRNuAG/PHzTiyzYRP8BN3r8Wsa+OkKyi4BOuQB7yYbIEVc+MPkMLXP3aMQIxUbCeMfJtGt9/4q2b8x7SwO"
        "Q/qT5P/rDdgDHAXyyxV99Q/KEwvs/h8zGeEo+q0EBFftDBAH9b7kAM9B/Mki2hvb4yvwE08IzwQP/fU+6iMYCf41BPc/JPIT49YdDews3+kI"
        "1c/+Debb7koDE/rz9g=="
    ),
    (1, 10): (
        "EuUyrt8Z+DIR91QA0wcQARf5/PAPyekkEQTA8yD1/REEKTzyJAIxDf3ZH+IIIxAE5N0d7i798hEhAfAiBy72A8zrEfAYO+sN/NsNKRP2HvIA"
        "+PDqAOQFGgzOGer1ue8j0epJHPgmBs0V2+8JAi0GywbvI/X4tQcwAOgiAjX399oawQ/sFAgu89s9Jw7p3/7pIEAF5t7zGvnrFhzzQj4JHin7"
        "+SDbASXrAurT4+wl/vnqJCMEB9vn+B3jGfg1AOv3QPsY7Avd17QD0s4o/QwJ+f4S2d0+/yruCTD3EvQCOhXl8BoBHiTiEP7OCe0eAdcV/vYZ"
        "LdX01Rf+6tPt4xzgB/v96ygA6/TB3MULxhQZLev6Eyn24usfNOcPAyncDPX2+t0eAARID0T78yP2C+4YGu3V+xz4HO7MMPkJywvyQ8LnHi7y"
        "+B4OQ9YRIiILzDkCDd4q2SMMBbrp/vpBJegP1wMbtyT27f7m5xoKyeIU7QjMF+y3E/E59fUQ2d/ZGyD3B7zsM+8XBfkR5/oaFfvtyxEv6/vB"
        "1knmHwzJ0RQB5fv+CNhCFw7Y09/5+v7fGPvLAPExEtMfOujIKjjr/Qc+ytMCVP34FwHn+foGMTb08iIa8SvhL/v1HtAB6vDxHwblESLgFN30"
        "FjHIGgoiDiL3zSXdBugjxQLD7gkm7Bbi+xreHN4M+w47D7wmC/EdH9UlNTgD9+ce4Bwj2Rb3C7ok8P3m5xgI1fDyxPEOJw3iOhYhFPX7Ns8d"
        "By7rAgcLDtLd+00BNtoFGbUK8PP42AvmG/A7DB/LE+n32RYS58gA/E4NLRHO4P4P+hYHF+DdAfjhBBjZKt0YIgQgDdUmA+kI1c/zL/on7vkK"
        "AtMn4uIr9hQh7R//80wJ3ysH6vHv18/5yeMT2AkxAwvMHRwLJPsFPiPU4Qs4488G/AwIvg0KBPAaL+G3OPgj1uvpBNIS0bY77u0D/Q8DIAL/"
        "5Nj+G9Lq5Abe/iD5/P7kGELo6OgLEfjZEdX2DzDy0dcFAizlGgE9AhMA8PKz4fkAHewL7f/XvNn+uCkZE/snOhvr/tz39fgQD/70Byq2I+0G"
        "DvPkGvD3CCnW5Af52y7oHPEH9RoXLfwd3AMv8/3mNRjp+gYlAQbtFQTP/gjMQAP58jX7BB8CzfIVDMws2BD478ATJfcn8SbVEdrx9v04Jecf"
        "FRT7Gf/wCvkPPOXTLfbqBTwC4yrF4x0lKBTgAB303wEUtvYUwSbu9QYN7+HhFjs6CwPi6h8W+xMWC/sRIf7l/yfyxtwaEdXYMtcg7x4r5zbw"
        "C+T+6d4EABz33zMZ5gQk5wFL6Q/eAtzpDu4D/x301xZW3BL5yg7yDe0f+hDA1/L/6BwE+A=="
    ),
    (2, 10): (
        "EuIwqt8BF0IYBXL4zvYaCxsKAuUHuO4YFvzI6Cv85A4RLD/3JgM4Ff72LdUAJDoP5+Aa+if97g8SE+47Ay8Q9snfF/guLPcJ794cRxf0MOXu"
        "CPTlDu8YCxDQAfjnmukux+RKHwMl9c4Y2en0Ai4byOr+HPPqwQkoEvAwCSL89eERyQ/rFw0u8tRGLgbx0PvnI0z84tjsHv33IyD+M1AHGj3s"
        "/BnkABvc/P3V4fAkAujyHi34AuDc/TLLDvklC9DkSwQc4wnC2ZEDxNIh+BwT+QcR4tRR/Tfo/y7tDQT1OSLh5RcGJTLqCwrH/OsV/dcc/O0a"
        "GM773xX22Lnu4wbOEu0D8Sv03/O627QOzwUdOuLuLib6y9QeQeoLDSHREfnn598mAQdoB0gJ7jv9CPkXJuTL/xsGF/fPKvYOwxb2ULTzMj3v"
        "/D4TO9MaNi4iyEIH+tMluyYW/Kfb/+9MLusZ0OEStzj93/3l4xIdx+AQ8QuyDNK0Cd9F7/MS6NjhERz39rTtLfEjDg0N2fH/EvfZoRcy5vmo"
        "vlvUHA7WwQwF7uUE/8o6IA7Yv+foBvbX/wnIBuZEHdMWOebIKT/tFAQ1u9QQavXzE/vXHfsLPELtByAI8zDROPoJINP74vzaMgvxMC/cCeoD"
        "Gx7KIAMVJCv1zCfT+94isxK66vgP5ST1By7dKc8S+RVPIqwzBesON9EmQFwH9ukZ3iks0RP7DpsM8/3G4igCzendr9wkEijrVBsXG+/6N8gh"
        "ATzh+QsmDM3l8zUASOEZJrII8OnTwBTvGPdQDifRFOj0ySoO7LED9kISJSnB6QAT/wb+EtzrFvLmBBziLu0GHBAICNEf8OEDy8HkK/4r7dsI"
        "8rgt3OEd/CA97RcD9VIV4U4W2tjzzt0AqMMe2foo9AzYNhwFKQX3Qi/E8BRH1avnBBHzxAfrBOUmQd23QvUbxPbMD8wa1LZL3+oLAxwROQEO"
        "3cn4Gtfx1gnM+SUNAPDfLVjs0ukNBvvdGL/vBi3v0s8CBCPuHvRJ/hID6vu52OnuIvkP6QPUtNIRtjMRKwEWUib1Btn1EfIOGfjoJj6fJ+oO"
        "B+LRHvYCBDTq2Q736CT3JAAO/RArHvwi1wQ5B/fhOA7rARo2DPALLQu6+O7QOAH39jUE5hwEqvsUEc1U0CH28bsWM/UO+yjlBMvU7f84JvEV"
        "NAIYFPrpD/kWWdbQM/P3Cz4A3yDE2xAqKwbd/iLw7Asby/IYtyTk8AoN8+TZFi9GFQPe6iMh/Bo2JfsFGOjrHTrqxN4ZEObDYc8x8yAw6knk"
        "Ed390OP7CR/v5CE05QAO1PVK1g/7DubUBuUI+yTyygpY6xrtyAfnCO4YBSiRy+sF6CMBBQ=="
    ),
    (3, 10): (
        "Fuk1suIfEEsOBX/6y/MiGQ3+9ukJr+4cGAK74Cv26woXLkT+Kgk7H/nzI94ILTsW4tMY7SUA+gsWEOsuAiL8+s3aGPImMQAJ790hQhX4L+z4"
        "COveCvUiFhTKBPjggecywORnJAko/88Q3ev7AR0iyAT2Fe/2xAcvEO0lDzQC9+AMxBTjHwUz+t9OMhL00PnrKEkJ4OXtFvoFIRf5P1oPHz7s"
        "Cx/r/xPfCeHVyuki+PX2IzII7tzc/TfNGPQnCOHiSQAc3AK8zJETt9AmAhgM+/4Q1eVVA0Tz+TLqDgT5Rh7T2gkBIzPvEwLA9eYcCtcV8PEb"
        "G8n85Cnm3sPm8wvWE+f++0De1u+4078Jwx0WOeLuKTX72s4hSeUYEijXB/fw798n+AVuDUkG+TT8De8VIee0/BgFDPTRJAIUxQ/8Y7DoKEzv"
        "Aj0TOtAiKS0WwEAM+NIewCwNAaXg/fZWLOkR09YYszLz5Pze5g4g09wV+QWrC8y7/N497vwK6NXZFB/2/aTsMPUcAA/+0fMCDunelB844AG/"
        "vFzOIhLL0wv96N0I/MhDGA7att3m/vPdBvjICug9JdcXRPLLKjvmFwQ8v9wKbP3uF+7UH/gROUjqAiUO9jLRPvQHINwO4u3TMgH4IS3XDuYC"
        "GiC/IgUYOC7qySnd/N8brhLC6gIR8iD3CTHhM8YdABFNKKo4BO4UKsgnP1sB8dsW5CUwzwjtHJ4I+P7P3CgO0OziuuYpGh/3UC4VGuz7OMwr"
        "CDrrAAIWF8DW8VUEPd4iHKgH7eHUuyLtEvFDAx3IFub0zSQK4bIB9E4XMybD8woJ/Af/Fe3rDPfb/SPaMeYJIREZE9oZ+OUFzcrYI/gy6uEF"
        "76862+cmAxI06BwO9GEO4UMR38Lyz9f/nLsXz/Yu/AzOPRgBKAwBOiDS5RFCxKnuAxoHzQ/1CekvPdKmTAMdu/DHD7wi1rRD2usB/hsTLgb9"
        "3sz+FNrt6QjH9h0M+erjKmzj1vQBC/TdFr/qBTTx0tL5Bi3oFvJKBQn47uOx1O3sHP0Q4fbKp8QMrDIXJfw3Uyb2BtrwAOcQDf7oIUObLu8C"
        "EubOHwYM/zL43RDy7CP4JfcJAhUuHfoc3gU2DvXoSRLs/Ck3GQQHJxO3+e3OOgfxAD777xkJr/MSF8pT3CX58LoQIPcaAyriCc7Z7v1AKO0c"
        "LQcHFPXyGgMOVdLaO/rvEjgC3SnI2BUoH/3jBDD13wMbu+UauyPz9BAK9N7PGy9MDPrj6SIu+SglGQMJF+viJjj2x9YQDuW9Xc0s9SIx1UPt"
        "EeT52uf6DhTo2TQr7QMR0/ZS2w7rAubb//X1DR3x0whW5hD1wwHrAO4lDBuU0vMD5SIABg=="
    ),
    (4, 10): (
        "HOIxqeMSC0UQBX8B1PsaFhL/+u8Lru8fHAa/4Cn79gQSMkr/Hws3KvbtIuAGJz4Z6NEh7Sz/8xQcDfY3BiUC+c/aFvYmKv8M698hOhnxL+f4"
        "A+7pB/cdEQzOAPHkgeUpwdxbKgQjANMO4u/x+hcfyvr0C/H3vAsxD+sfFSgD/uMTyg/nGgsu/eBOOgfu2PbyJkkF4+XsE/D6IBn7PlYMFjnm"
        "CBrpAxDe/d7Y0+wi9O74HS8B8tno+TfLE+4lCdPhSAMe3v3J1JUPvc4oBhQLAPwN1NxH/Dz1AzDrAgf0QCLb2BQKIC3rDgTC+uQYCtIT8u0W"
        "G9H75iXc18fg6RDgCeb69Dvq3e2z178LzBQeNeHuKTT82dEjQOUXDSDbB/Lp7OMl9gZ1C1AB8jL9D/gUHOW7+RYECfTSJgEOxBD+Uq/qMkvw"
        "/DgSPNAgKS8axUIL984iwSoN+5zfAPFRNOcX190ZtDP25fPg6hAey+UU/wepC8q4/N5D5/YG69PiEhrx/aPtLvIaBRL+z/cCC+jdlRs53gS2"
        "wFzVJhPMxwv68OYL/8w/FxHYu9zp//TgBPjDDOE1HtYVN+zHJz3kFgZGvdoIZADyDvvSHfgXNknsBCMD9zDOO/0OG9gJ4+viJwLyHSvcEfD9"
        "GCLBIwYaLyvs0SvaAt4jqxO+8fcX6x38CSzgHsIgCBdCJ6Y3APAPKc8tOVsA8uAb5SQw1BDzGqEI+QXR1yMNx+Lbt+koHxjyTywZI/D5O88p"
        "DjLmCwYUGMTZ9UMLTNsjHqYF6efVxhjuEfNCDBXFEuv30iYF5a4A/FEXIyzA9wQG+wkBDuPsEfTaABfbL+kNIB8SC9YZ9+IEzsjUKvcx7+cG"
        "6bU93t8jARgw6xwI8GoU4EMOyND019j/tMEc1P0w9Q/NLBcEJQn8Ox7S6RBIxLDxARUEzAn3DOkzO9iyTP4YvvDGEcUjz7dE4eUI+CEHNAL9"
        "3NX7E+Dr3QDL9h4K9e/mKWvm2/P9BPnaELznAjLiydL6BSrtG/M/Ag/67ei53PH1GfwK5vXHrckPtDUVJgEtUBz6Cdb0+O4LEvznKD6eL/EF"
        "E+zWHQQNBjj14w3x7Rz7Hf0FARQtIvYm4AAyB/joQQ/v+yA4EAUHLhW4+PDTNgX2/0D/6x0MqvQPFs5d1hz7+b0JIgMX/y/mBs3e9wA6HO8W"
        "JAsOEwDtFAEaWNTcMvbvB0L85SS71hskKwDdByjz5gkUxOwRuSnt7w0M8uHWFzdIFAHl6CIi+ykkGgIHFuriHjTyxtsSC+nLVtEu8yI010bp"
        "FOH73OfzERvt5Cky5/8P2Plj3wvz/eXcAPj7BiD0yw1S7BD0yQTmAu4qCiWM2vH44h34/Q=="
    ),
}
