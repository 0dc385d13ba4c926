"""Stage `tokenizer`: a sentencepiece unigram model over the world's captions, in T5's format.

Every word of the captions is one piece, scored by the logarithm of its share; every letter, digit and
mark that a prompt may hold is a piece too, so plain English never becomes <unk>. (The pieces that
sentencepiece finds are not used: on so few words it cuts "there" and "is" apart.) Special ids are T5's
(<pad> 0, </s> 1, <unk> 2); text is case-folded.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections import Counter
from pathlib import Path

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from transformers import T5Tokenizer

from .tokenizer import MAX_TOKENS
from .world import sample_scenes

_CHARACTER_SCORE = -14.0  # below any word's, so that a word in one piece always wins
_CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,;:'!?()-"


def build_tokenizer(folder: Path, captions: int = 20000, seed: int = 0) -> None:
    """Count the words of training captions and write spiece.model, tokenizer.json and tokenizer_config.json.

    Args:
        folder: where to write; made if missing.
        captions: how many to count.
        seed: of the captions.
    """
    scenes = sample_scenes(captions, seed)
    proto = _unigram([scenes.caption(i) for i in range(captions)])
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    charsmap = proto.normalizer_spec.precompiled_charsmap
    folder.mkdir(parents=True, exist_ok=True)
    T5Tokenizer(vocab=pieces, _spm_precompiled_charsmap=charsmap, extra_ids=0).save_pretrained(folder)
    (folder / "spiece.model").write_bytes(proto.SerializeToString())
    config = {
        "tokenizer_class": "T5Tokenizer",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "extra_ids": 0,
        "additional_special_tokens": [],
        "model_max_length": MAX_TOKENS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _unigram(sentences: list[str]) -> sentencepiece_model_pb2.ModelProto:
    """A sentencepiece model whose pieces are the words of `sentences` and single characters."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences[:1000]),
        model_writer=model,
        model_type="unigram",
        vocab_size=200,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        normalization_rule_name="nmt_nfkc_cf",
        num_threads=1,
        minloglevel=2,
    )
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    counts = Counter(word for sentence in sentences for word in re.findall("[a-z]+", sentence))
    total = sum(counts.values())
    pieces = {
        f"▁{word}": math.log(n / total) for word, n in sorted(counts.items(), key=lambda c: (-c[1], c[0]))
    }
    pieces |= {c: _CHARACTER_SCORE for c in "▁" + _CHARACTERS}
    del proto.pieces[3:]
    for piece, score in pieces.items():
        proto.pieces.add(piece=piece, score=score)
    proto.trainer_spec.vocab_size = len(proto.pieces)
    return proto
