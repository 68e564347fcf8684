"""Run by an interpreter that has llama_cpp: tokens of a text, the text of them, and what the model says next.

Argument: a JSON file with model, text and the number of tokens to generate; prints JSON.
"""

import json
import sys
from pathlib import Path

from llama_cpp import Llama

job = json.loads(Path(sys.argv[1]).read_text())
model = Llama(job["model"], n_ctx=256, vocab_only=not job["tokens"], verbose=False)
ids = model.tokenize(job["text"].encode(), add_bos=True, special=True)
generated = []
for token in model.generate(ids, top_k=1, temp=0.0) if job["tokens"] else ():
    generated.append(token)
    if len(generated) == job["tokens"]:
        break
text = model.detokenize(ids).decode()
print(json.dumps({"ids": ids, "text": text, "generated": generated}))
model.close()
