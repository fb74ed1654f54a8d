// What happens to a row's scores between q k and the softmax: softcap, ALiBi, mask, window. Apart from online_softmax, so that a
// call without such rules pays nothing for them. Included by lean_tile-inl.hpp; not a header that compiles alone.

HWY_BEFORE_NAMESPACE();
namespace lean::cpu::HWY_NAMESPACE {
namespace {

/// tanh (softmax/tanh_fit.hpp), relative error below 2^-22; NaN stays NaN.
HWY_INLINE Vec tanh_of(Vec x) {
  const F32 f32;
  const Vec magnitude = hn::Abs(x);
  const Vec square = hn::Mul(x, x);
  Vec p = hn::Set(f32, softmax::kTanh11);
  p = hn::MulAdd(p, square, hn::Set(f32, softmax::kTanh9));
  p = hn::MulAdd(p, square, hn::Set(f32, softmax::kTanh7));
  p = hn::MulAdd(p, square, hn::Set(f32, softmax::kTanh5));
  p = hn::MulAdd(p, square, hn::Set(f32, softmax::kTanh3));
  const Vec near_zero = hn::MulAdd(hn::Mul(p, square), x, x);
  const Vec one = hn::Set(f32, 1.0F);
  const Vec e = exp2_nonpositive(hn::Mul(magnitude, hn::Set(f32, -2.0F * softmax::kLog2E)));
  const Vec elsewhere = hn::CopySign(hn::Div(hn::Sub(one, e), hn::Add(one, e)), x);
  return hn::IfThenElse(hn::Lt(magnitude, hn::Set(f32, softmax::kTanhFitEnd)), near_zero, elsewhere);
}

/// Of the last vector, what lies past the last token is not looked at: nobody computed it.
void apply_rule(float* s, std::int32_t tokens, const ScoreRule& rule) noexcept {
  const F32 f32;
  const I32 i32;
  const Vec scale = hn::Set(f32, rule.scale);
  const Vec cap = hn::Set(f32, rule.cap);
  const Vec inverse_cap = hn::Set(f32, rule.cap > 0.0F ? 1.0F / rule.cap : 0.0F);
  const Vec slope = hn::Set(f32, rule.slope);
  const Vec none = hn::Set(f32, softmax::kNegInf);
  for (std::int32_t t = 0; t < tokens; t += kLanes) {
    const Vec raw = tokens - t >= kLanes ? hn::Load(f32, s + t) : load_first_lanes(f32, s + t, tokens - t);
    Vec x = hn::Mul(raw, scale);
    if (rule.cap > 0.0F) x = hn::Mul(tanh_of(hn::Mul(x, inverse_cap)), cap);
    if (rule.slope != 0.0F) {
      const Vec distance = hn::Abs(hn::ConvertTo(f32, hn::Iota(i32, t + rule.distance)));
      x = hn::NegMulAdd(distance, slope, x);
    }
    if (rule.bias != nullptr) {
      const Vec bias = hn::Load(f32, rule.bias + t);
      x = hn::IfThenElse(hn::Eq(bias, none), none, hn::Add(x, bias));
    }
    if (t < rule.seen_begin) {
      const auto hidden = hn::Lt(hn::Iota(i32, t), hn::Set(i32, rule.seen_begin));
      x = hn::IfThenElse(hn::RebindMask(f32, hidden), none, x);
    }
    hn::Store(x, f32, s + t);
  }
}

}  // namespace
}  // namespace lean::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
