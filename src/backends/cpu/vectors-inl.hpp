// Vectors of the instruction set being compiled, and what all kernels share: tags, partial loads, exp2.
// Included by lean_tile-inl.hpp once per target; not a header that compiles alone.

#include "backends/cpu/unroll.hpp"
#include "hwy/highway.h"
#include "softmax/exp2_fit.hpp"
#include "softmax/tanh_fit.hpp"

HWY_BEFORE_NAMESPACE();
namespace lean::cpu::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using Vec = hn::Vec<F32>;
using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;

constexpr std::int32_t kLanes = HWY_LANES(float);     // fixed-size targets only
constexpr bool kManyRegisters = HWY_MAX_BYTES >= 64;  // 32 vector registers: 24 sums fit, else 12 of 16

/// The first n < kLanes elements, zeros behind them; never reads past element n - 1.
template <typename TTag, typename TLane = hn::TFromD<TTag>>
HWY_INLINE hn::Vec<TTag> load_first_lanes(TTag tag, const TLane* p, std::int32_t n) {
#if HWY_MAX_BYTES >= 64
  return hn::MaskedLoad(hn::FirstN(tag, static_cast<std::size_t>(n)), tag, p);
#else
  HWY_ALIGN TLane padded[HWY_MAX_BYTES / sizeof(TLane)] = {};
  for (std::int32_t i = 0; i < n; ++i) padded[i] = p[i];
  return hn::LoadU(tag, padded);
#endif
}

/// 2^f on [-1/2, 1/2].
HWY_INLINE Vec exp2_of_fraction(Vec f) {
  const F32 f32;
  Vec p = hn::Set(f32, softmax::kExp2Fit[0]);
  LEAN_UNROLL for (int i = 1; i < 7; ++i) p = hn::MulAdd(p, f, hn::Set(f32, softmax::kExp2Fit[i]));
  return p;
}

/// 2^x for x <= 0, relative error below 2^-22.5; exactly 1 at 0, exactly 0 below -126 and at -inf; NaN stays NaN.
HWY_INLINE Vec exp2_nonpositive(Vec x) {
  const F32 f32;
#if HWY_ARCH_X86 && HWY_MAX_BYTES >= 64
  // The same bits in ten operations for fifteen: a mask in place of blends, and vscalefps adds to the exponent.
  const __mmask16 weighs = _mm512_cmp_ps_mask(x.raw, _mm512_set1_ps(-126.0F), _CMP_NLT_UQ);  // or is NaN
  const __m512 whole = _mm512_maskz_roundscale_ps(weighs, x.raw, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vec power = exp2_of_fraction(Vec{_mm512_maskz_sub_ps(weighs, x.raw, whole)});
  return Vec{_mm512_maskz_scalef_ps(weighs, power.raw, whole)};
#else
  const I32 i32;
  // What weighs nothing becomes -127, whose power is 0: -inf itself would meet 0 x inf, which is invalid. Not (x >= -126) would
  // also catch NaN: compare the other way round.
  const Vec least = hn::Set(f32, -127.0F);
  x = hn::IfThenElse(hn::Lt(x, hn::Set(f32, -126.0F)), least, x);
  const Vec whole = hn::Round(hn::Max(x, least));  // a whole number of NaN too
  const Vec power = hn::BitCast(f32, hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(i32, whole), hn::Set(i32, 127))));
  return hn::Mul(exp2_of_fraction(hn::Sub(x, whole)), power);
#endif
}

}  // namespace
}  // namespace lean::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
