import random

import pytest
import torch
from sixbit_diffusion.sixbit_core import courier as module
from sixbit_diffusion.sixbit_core.courier import Courier, bytes_on_device, slots_ahead

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def send(courier: Courier, key: object, value: float, device: str, size: int = 64) -> None:
    """A group of `size` values, the last quarter of them in bytes."""
    wide = torch.full((size * 3 // 4,), float(value), device=device)
    narrow = torch.full((size,), int(value) % 100, dtype=torch.int8, device=device)
    courier.send(key, (wide, narrow))


def held(courier: Courier, key: object) -> float:
    wide, narrow = courier.fetch(key)
    assert wide.dtype == torch.float32 and narrow.dtype == torch.int8
    assert (wide == wide[0]).all() and (narrow == int(wide[0]) % 100).all()
    return float(wide[0])


@pytest.fixture
def late_copies(monkeypatch):
    """On a GPU every stream is late: a copy that does not wait for what comes before it takes old values."""

    def sleeping(get):
        def late(self, *args):
            if torch.cuda.is_available():
                for stream in (torch.cuda.current_stream(), *_streams(self)):
                    with torch.cuda.stream(stream):
                        torch.cuda._sleep(random.randrange(2_000_000))
            return get(self, *args)

        return late

    def _streams(courier):
        return [s for pair in courier._streams.values() for s in (pair.out, pair.back) if s is not None]

    for name in ("send", "_begin"):
        monkeypatch.setattr(Courier, name, sleeping(getattr(Courier, name)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_asked_for_in_whatever_order_is_what_was_sent(device, seed, late_copies):
    courier, expected, rng = Courier(), {}, random.Random(seed)
    large = 1 << (21 if device == "cuda" else 10)
    for turn in range(40 if device == "cpu" else 8):
        courier.expect(rng.sample(range(30), 20))
        found = []
        for _ in range(30):
            key, size = rng.randrange(30), large if seed < 3 else rng.choice([64, large])
            move = rng.choice(["send", "fetch", "fetch", "drop"])
            if move == "send":
                expected[key] = turn * 100.0 + key
                send(courier, key, expected[key], device, size)
            elif move == "drop":
                expected.pop(key, None)
                courier.drop(key)
            elif key in expected:
                wide, narrow = courier.fetch(key)  # read later: nothing waits
                ends = torch.stack([wide.min(), wide.max(), narrow.min(), narrow.max()])
                found.append((ends, [expected[key]] * 2 + [expected[key] % 100] * 2))
            assert (key in courier) == (key in expected)
        assert all(ends.tolist() == values for ends, values in found)


def test_what_is_expected_is_under_way_before_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(module, "AHEAD_BYTES", 3 * 256)
    courier, begun = Courier(), []
    begin = Courier._begin
    monkeypatch.setattr(Courier, "_begin", lambda self, key: (begun.append(key), begin(self, key)))
    for key in range(6):
        send(courier, key, key, "cpu")
    courier.expect([0, 1, 9, 2, 3, 4, 5])
    ahead = slots_ahead(256)
    assert ahead == 3 and begun == [0, 1, 2, 3]  # one slot more, which a fetch lends out
    assert held(courier, 0) == 0 and begun == [0, 1, 2, 3]
    assert held(courier, 1) == 1 and begun == [0, 1, 2, 3, 4]
    assert [held(courier, key) for key in (2, 3, 4, 5)] == [2, 3, 4, 5] and begun == list(range(6))


def test_what_is_on_the_device_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "AHEAD_BYTES", 4 * 256)
    courier = Courier()
    for turn in range(3):
        for key in range(50):
            send(courier, key, turn, "cpu")
        courier.expect(range(50))
        assert all(held(courier, key) == turn for key in range(50))
    slots = [slot for ring in courier._rings.values() for slot in (*ring.outgoing, *ring.idle)]
    slots += [coming.slot for coming in courier._coming.values()] + [courier._lent[1]]
    assert sum(slot.bytes.nbytes for slot in slots) == bytes_on_device(256)


def test_nothing_there_is_a_key_error():
    with pytest.raises(KeyError):
        Courier().fetch("a")
