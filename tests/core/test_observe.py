import pytest
import torch
from sixbit_diffusion.sixbit_core.observe import Observer


def test_reads_all_in_order_once():
    observer = Observer()
    observer.record("a", torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16))
    observer.record(("b", 1), torch.tensor(3.0))
    observer.flush()
    observer.record("a", torch.tensor([4.0]))
    assert observer.read() == [("a", [1.0, 2.0]), (("b", 1), [3.0]), ("a", [4.0])]
    assert observer.read() == []


def test_rows_of_one_tensor_are_read_apart():
    observer = Observer()
    observer.record("a", torch.tensor([9.0]))
    observer.record_rows("b", torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), [0, 2])
    observer.record_rows("c", torch.tensor([7.0, 8.0]), [1])
    assert observer.read() == [("a", [9.0]), ("b", [1.0, 2.0]), ("b", [5.0, 6.0]), ("c", [8.0])]


def test_a_later_change_of_the_source_is_not_seen():
    observer, source = Observer(), torch.tensor([1.0])
    observer.record("a", source)
    observer.flush()
    source.fill_(9.0)
    assert observer.read() == [("a", [1.0])]


def test_reset_equals_new():
    observer = Observer()
    observer.record("a", torch.ones(1))
    observer.flush()
    observer.record("b", torch.ones(1))
    observer.reset()
    assert vars(observer) == vars(Observer())


@pytest.mark.gpu
def test_transfer_waits_for_nothing_until_read():
    observer = Observer()
    big = torch.randn(4096, 4096, device="cuda")
    observer.record("warm", torch.zeros(1, device="cuda"))
    observer.read()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):
            big = torch.tanh(big @ big)
        observer.record("late", (big * 0 + 7).mean())
        observer.flush()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert observer.read() == [("late", [7.0])]
