import pytest
from sixbit_diffusion.reference.captions import WORDINGS, caption_of
from sixbit_diffusion.reference.tokenizer import FOLDER, MAX_TOKENS, load_tokenizer, token_ids
from sixbit_diffusion.reference.world import MOTIONS, PAIR_MOTIONS, sample_scenes


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


@pytest.fixture(scope="module")
def captions():
    """Every wording of every motion, with objects of the longest names, and a draw."""
    thing = ("purple", "triangle")
    every = [caption_of((thing,), "beige", motion, k) for motion in MOTIONS for k in range(WORDINGS)]
    every += [caption_of((thing, thing), "beige", m, k) for m in PAIR_MOTIONS for k in range(WORDINGS)]
    scenes = sample_scenes(500, 9, "all", pair_share=0.5)
    return sorted({*every, *(scenes.caption(i) for i in range(500))})


def test_captions_fit_and_hold_no_unknown_token(tokenizer, captions):
    ids = tokenizer(captions).input_ids
    assert max(map(len, ids)) <= MAX_TOKENS
    assert not any(tokenizer.unk_token_id in row for row in ids)
    assert all(row[-1] == tokenizer.eos_token_id == 1 for row in ids)


def test_ids_equal_those_of_sentencepiece(tokenizer, captions):
    sentencepiece = pytest.importorskip("sentencepiece")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(FOLDER / "spiece.model"))
    others = ["A Red Circle?", "two  spaces, an unseen word: zebra", "", "a (blue) square; it's 3-sided!"]
    for text in [*captions, *others]:
        assert tokenizer(text).input_ids == [*processor.encode(text), 1], text
    assert len(tokenizer) == processor.get_piece_size()


def test_padding_is_the_pipelines(tokenizer):
    ids = token_ids(tokenizer, ["", "a red circle moves left on a white background"])
    assert ids.shape == (2, MAX_TOKENS)
    assert ids[0].tolist() == [1] + [0] * (MAX_TOKENS - 1)
    assert (ids[1] != 0).sum() == 10


def test_every_wording_reads_back(tokenizer):
    text = "there is a pink star that turns around, and the background is navy"
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
