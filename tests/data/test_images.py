import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.data import BatchStream, Cursor, ImageDataset, Images, ImageShards, load_images
from atoll.data.images import FASHION_FOLDER
from atoll.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def drawn() -> ImageDataset:
    return load_images("segments")


def write_idx(path: Path, array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(bytes((0, 0, 8, array.ndim)) + sizes + array.tobytes())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part, count in (("train", 30), ("t10k", 10)):
        pixels = np.arange(count * 16, dtype=np.uint8).reshape(count, 4, 4)
        write_idx(tmp_path / f"{part}-images-idx3-ubyte", pixels)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte", np.arange(count, dtype=np.uint8) % 3)
    return tmp_path


def test_batches_are_normalised_images_and_their_classes(drawn: ImageDataset) -> None:
    images, classes = drawn.train.batch(torch.arange(len(drawn.train)))
    assert images.shape == (4096, 1, 16, 16)
    assert images.dtype == torch.float32
    assert classes.dtype == torch.int64
    assert abs(images.mean().item()) < 1e-3
    assert images.std().item() == pytest.approx(1.0, abs=1e-3)
    assert classes.bincount().tolist() == [410] * 6 + [409] * 4


def test_drawn_images_are_the_same_on_every_machine(drawn: ImageDataset) -> None:
    assert drawn.digest == "55053768f25e6ae292282e4ccb300812"


def test_same_digit_is_not_always_at_the_same_place(drawn: ImageDataset) -> None:
    assert isinstance(drawn.train, Images)
    ones = drawn.train.pixels[drawn.train.labels == 1].astype(int)
    brightest = {int(image.sum(axis=0).argmax()) for image in ones}
    assert len(brightest) >= 8


@given(slots=st.integers(1, 6), seed=st.integers(0, 2**63), order=st.booleans())
def test_no_image_is_in_two_shards_and_none_is_left_out(slots: int, seed: int, order: bool) -> None:
    images = load_images("segments").train
    shards = ImageShards(
        images, slots=slots, seed=seed, order="shuffled" if order else "contiguous"
    )
    parts = [shards.indices(slot, np.arange(shards.num_windows(slot))) for slot in range(slots)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(images)))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_contiguous_shards_hold_few_classes(drawn: ImageDataset) -> None:
    def classes(order: str) -> list[int]:
        shards = ImageShards(drawn.train, slots=5, seed=1, order=order)
        batches = (shards.batch(n, np.arange(shards.num_windows(n))) for n in range(5))
        return [len(set(labels.tolist())) for _, labels in batches]

    assert max(classes("contiguous")) <= 4
    assert classes("shuffled") == [10] * 5


@given(before=st.integers(0, 12), batch=st.integers(1, 90), slot=st.integers(0, 2))
def test_stream_of_images_goes_on_from_any_cursor(before: int, batch: int, slot: int) -> None:
    shards = ImageShards(load_images("segments").train, slots=3, seed=7)
    stream = BatchStream(shards, slot=slot, batch=batch)
    for _ in range(before):
        next(stream)
    again = BatchStream(shards, slot=slot, batch=batch, cursor=stream.cursor)
    for _ in range(3):
        one, other = next(stream), next(again)
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_cursor_of_another_slot_is_refused(drawn: ImageDataset) -> None:
    shards = ImageShards(drawn.train, slots=2, seed=7)
    with pytest.raises(DataError, match="slot 1, window 0; expected: slot 0"):
        BatchStream(shards, slot=0, batch=2, cursor=Cursor(1))


def test_evaluation_sees_every_held_out_image_once(drawn: ImageDataset) -> None:
    batches = list(drawn.batches(batch=100))
    assert [len(labels) for _, labels in batches] == [100] * 10 + [24]
    labels = torch.cat([labels for _, labels in batches])
    assert labels.tolist() == drawn.held_out.labels.tolist()


def test_limited_evaluation_is_spread_over_the_held_out_images(drawn: ImageDataset) -> None:
    some = torch.cat([images for images, _ in drawn.batches(batch=7, limit_tokens=32)])
    assert torch.equal(some, drawn.held_out.batch(torch.arange(0, 1024, 32))[0])


def test_idx_files_are_read_plain_and_packed(folder: Path) -> None:
    plain = load_images(f"idx:{folder}")
    for path in list(folder.iterdir()):
        (path.parent / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    packed = load_images(f"idx:{folder}")
    assert plain.digest == packed.digest
    assert plain.model_options == {"channels": 1, "image": 4, "classes": 3}
    assert isinstance(plain.train, Images)
    assert plain.train.pixels[1, 0].tolist() == [16, 17, 18, 19]


def test_another_label_is_another_digest(folder: Path) -> None:
    before = load_images(f"idx:{folder}").digest
    write_idx(folder / "t10k-labels-idx1-ubyte", np.zeros(10, dtype=np.uint8))
    assert load_images(f"idx:{folder}").digest != before


def test_missing_folder_says_what_to_install() -> None:
    with pytest.raises(DataError, match=r"folder of images does not exist.*check the path"):
        load_images("idx:/nowhere/at/all")


def test_missing_file_is_named(folder: Path) -> None:
    (folder / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="t10k-labels-idx1-ubyte"):
        load_images(f"idx:{folder}")


def test_file_that_is_cut_short_is_refused(folder: Path) -> None:
    path = folder / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"not a complete idx file.*495 bytes"):
        load_images(f"idx:{folder}")


def test_images_without_labels_are_refused(folder: Path) -> None:
    write_idx(folder / "train-labels-idx1-ubyte", np.zeros(7, dtype=np.uint8))
    with pytest.raises(DataError, match="30 images of 4 x 4, 7 labels"):
        load_images(f"idx:{folder}")


def test_parts_of_two_sizes_are_refused(folder: Path) -> None:
    write_idx(folder / "t10k-images-idx3-ubyte", np.zeros((10, 6, 6), dtype=np.uint8))
    with pytest.raises(DataError, match="4 and 6 pixels a side"):
        load_images(f"idx:{folder}")


def test_fewer_images_than_slots_are_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="given: 30 images; expected: at least 31"):
        ImageShards(load_images(f"idx:{folder}").train, slots=31, seed=1)


def test_unknown_order_names_the_nearest(drawn: ImageDataset) -> None:
    with pytest.raises(ConfigError, match="did you mean 'shuffled'"):
        ImageShards(drawn.train, slots=1, seed=1, order="shuffle")


@pytest.mark.skipif(not FASHION_FOLDER.is_dir(), reason="Debian's package is not installed")
def test_fashion_mnist_is_what_was_published() -> None:
    data = load_images("fashion-mnist")
    assert (len(data.train), len(data.held_out)) == (60_000, 10_000)
    assert data.model_options == {"channels": 1, "image": 28, "classes": 10}
    assert data.train.mean == pytest.approx(0.2860, abs=1e-4)
    assert data.train.std == pytest.approx(0.3530, abs=1e-4)
