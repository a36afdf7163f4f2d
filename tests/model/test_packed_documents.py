"""Documents packed in rows, as the fused kernel for NVIDIA GPUs is told of them."""

import numpy as np

from pretrax.model.attention_kernels import packed_documents


def test_the_example_of_jax_documentation():
    # jax.nn's cuDNN entry: 'if 2 batches has 3 and 2 segments respectively, each segment has size 1,
    # q_offsets = [[0,1,2,-1], [0,1,-1,-1]]'; the second row's last segment is longer here, to fill the row.
    lengths, offsets = packed_documents(np.array([[1, 2, 3], [1, 2, 2]], np.int32), 3)
    np.testing.assert_array_equal(offsets, [[0, 1, 2, -1], [0, 1, -1, -1]])
    np.testing.assert_array_equal(lengths, [[1, 1, 1], [1, 2, -1]])


def test_lengths_cover_the_row_and_offsets_are_their_sums():
    random = np.random.default_rng(0)
    segments = np.cumsum(random.random((16, 64)) < 0.1, axis=1).astype(np.int32)
    segments += 1 - segments[:, :1]
    most = int(segments.max())
    lengths, offsets = map(np.asarray, packed_documents(segments, most))
    for row in range(16):
        count = int(segments[row].max())
        assert [int(n) for n in lengths[row, :count]] == [int((segments[row] == i + 1).sum()) for i in range(count)]
        assert (lengths[row, count:] == -1).all()
        assert [int(n) for n in offsets[row, :count]] == [int(np.argmax(segments[row] == i + 1)) for i in range(count)]
        assert (offsets[row, count:] == -1).all()
