// The polynomial by which the CPU's kernels raise 2 to a fraction, whatever their vectors.
#pragma once

namespace lean::softmax {

/// 2^f on [-1/2, 1/2], the highest power first: minimax fit of degree 6 with p(0) = 1 (relative error 2e-9 before rounding).
inline constexpr float kExp2Fit[] = {
    0.00015353362F, 0.00133988739F, 0.00961843692F, 0.0555033237F, 0.240226477F, 0.693147182F, 1.0F};

}  // namespace lean::softmax
