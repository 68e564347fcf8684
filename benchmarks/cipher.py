"""A toy language pair, and a tiny Switch Transformer that learns it in seconds: a cipher of words in another order.

A sentence has at most one word of each of six classes, at least four of them, in the order of the classes; its
translation has the words of the cipher in another order of the classes; some words have two translations, of which
chance takes the second less often, so that no model is always right. That is what BLEU, chrF and the quantization
of experts need of a translation, without any data.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

SYLLABLES = ("ba", "de", "ki", "lo", "mu", "na", "po", "ri", "su", "te")
CLASS_WORDS = 12  # of each class
CLASSES, SHORTEST = 6, 4
ORDER = (5, 0, 4, 2, 3, 1)  # of the classes in a translation
SECOND = 0.4  # how often the second translation of a word that has two
PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
SIZES: dict[str, Any] = {
    "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 2, "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1, "num_heads": 4, "num_experts": 4, "dropout_rate": 0.0,
}  # fmt: skip
RATE, WARM_UP = 5e-3, 50
Pair = tuple[str, str]


def words() -> tuple[list[str], list[tuple[str, ...]]]:
    """Words of two syllables, class by class, and the one or two translations of each, of three syllables."""
    count = CLASSES * CLASS_WORDS
    plain = [f"{a}{b}" for a in SYLLABLES for b in SYLLABLES][:count]
    shuffled = random.Random(1).sample(plain, count)
    first = [f"{SYLLABLES[index % len(SYLLABLES)]}{word}" for index, word in enumerate(shuffled)]
    return plain, [(word,) if index % 3 else (word, f"{word}n") for index, word in enumerate(first)]


def pairs(count: int, seed: int) -> list[Pair]:
    """Sentences and their translations."""
    chance = random.Random(seed)
    plain, cipher = words()
    sentences = []
    for _ in range(count):
        classes = sorted(chance.sample(range(CLASSES), chance.randint(SHORTEST, CLASSES)))
        chosen = {kind: CLASS_WORDS * kind + chance.randrange(CLASS_WORDS) for kind in classes}
        target = [cipher[chosen[kind]] for kind in ORDER if kind in chosen]
        said = [words[-1] if chance.random() < SECOND else words[0] for words in target]
        sentences.append((" ".join(plain[word] for word in chosen.values()), " ".join(said)))
    return sentences


def tokenizer() -> Any:
    """A token a word; sentences end with END."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    plain, cipher = words()
    vocabulary = [PAD, END, UNKNOWN, *plain, *(word for both in cipher for word in both)]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token=UNKNOWN))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=PAD, eos_token=END, unk_token=UNKNOWN)


def train(steps: int, batch: int = 64, seed: int = 0) -> tuple[Any, Any]:
    """A model and its tokenizer after some steps of AdamW on sentences that the seed decides."""
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    torch.manual_seed(seed)
    speaker = tokenizer()
    config = SwitchTransformersConfig(
        **SIZES, vocab_size=len(speaker), pad_token_id=0, eos_token_id=1, decoder_start_token_id=0
    )
    model: Any = SwitchTransformersForConditionalGeneration(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARM_UP) * max(0.02, 1 - step / steps)
    )
    data = pairs(steps * batch, seed + 1)
    for step in range(steps):
        inputs, labels = encode(speaker, data[step * batch : (step + 1) * batch])
        logits = model(**inputs, labels=labels).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
    return model.eval(), speaker


def encode(speaker: Any, some: Sequence[Pair]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What the model is given, and its labels with -100 where they are padded."""
    inputs = speaker([source for source, _ in some], return_tensors="pt", padding=True)
    target = speaker([reference for _, reference in some], return_tensors="pt", padding=True)
    labels = target["input_ids"].masked_fill(target["attention_mask"] == 0, -100)
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}, labels


def save(folder: Path, steps: int, sentences: int, seed: int = 0) -> tuple[Path, Path, Path]:
    """Train and save a model, and held-out sentences beside it; returns the model, its sources and its references."""
    model, speaker = train(steps, seed=seed)
    path = folder / "model"
    model.save_pretrained(path)
    speaker.save_pretrained(path)
    held_out = pairs(sentences, seed + 1_000_003)
    source, target = folder / "source.txt", folder / "target.txt"
    for index, file in enumerate((source, target)):
        file.write_text("".join(f"{pair[index]}\n" for pair in held_out), "utf-8")
    return path, source, target
