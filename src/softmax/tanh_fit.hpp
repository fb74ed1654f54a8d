// The polynomial by which both backends' kernels compute tanh near 0, for a softcap; elsewhere it is (1 - e) / (1 + e), e = exp(-2 |x|).
#pragma once

namespace lean::softmax {

/// tanh(x) for |x| below kTanhFitEnd: x and so many times x^3, x^5, x^7, x^9 and x^11. Cephes' tanhf (S. Moshier). No array, which device
/// code could not read.
inline constexpr float kTanh3 = -3.33332819422e-1F;
inline constexpr float kTanh5 = 1.33314422036e-1F;
inline constexpr float kTanh7 = -5.37397155531e-2F;
inline constexpr float kTanh9 = 2.06390887954e-2F;
inline constexpr float kTanh11 = -5.70498872745e-3F;
inline constexpr float kTanhFitEnd = 0.625F;

}  // namespace lean::softmax
