// Elements in and out of vectors, one type each. Included by lean_tile-inl.hpp; not a header that compiles alone.

HWY_BEFORE_NAMESPACE();
namespace lean::cpu::HWY_NAMESPACE {
namespace {

template <typename T>
struct Element;

template <>
struct Element<float> {
  using Storage = float;
  static constexpr bool kPairs = false;
  static constexpr bool kStoresVectors = true;
  static HWY_INLINE void store(Vec x, Storage* p) { hn::StoreU(x, F32(), p); }
  static HWY_INLINE Vec load(const Storage* p) { return hn::LoadU(F32(), p); }
  static HWY_INLINE Vec load_first(const Storage* p, std::int32_t n) { return load_first_lanes(F32(), p, n); }
  static float get(Storage x) { return x; }
  static Storage put(float x) { return x; }
};

template <>
struct Element<Half> {
  using Storage = std::uint16_t;
  static constexpr bool kPairs = false;
  // Highway's emulation where there is no F16C does not round to nearest even: put() does. Nor does it know infinities.
  static constexpr bool kStoresVectors = HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3;
  static constexpr bool kWidensInHardware = kStoresVectors || HWY_TARGET == HWY_NEON;
  using Tag = hn::Rebind<hwy::float16_t, F32>;
  using BitsTag = hn::Rebind<std::uint16_t, F32>;
  static HWY_INLINE void store(Vec x, Storage* p) { hn::StoreU(hn::BitCast(BitsTag(), hn::DemoteTo(Tag(), x)), BitsTag(), p); }
  static HWY_INLINE Vec widen(hn::Vec<BitsTag> bits) {
    if constexpr (kWidensInHardware) {
      return hn::PromoteTo(F32(), hn::BitCast(Tag(), bits));
    } else {  // move the fields to their fp32 places; 2^112 is the difference of the exponents' biases
      const U32 u32;
      const auto wide = hn::PromoteTo(u32, bits);
      const auto sign = hn::ShiftLeft<16>(hn::And(wide, hn::Set(u32, 0x8000U)));
      const auto fields = hn::ShiftLeft<13>(hn::And(wide, hn::Set(u32, 0x7FFFU)));
      const auto finite = hn::BitCast(u32, hn::Mul(hn::BitCast(F32(), fields), hn::Set(F32(), 0x1p112F)));
      const auto infinite = hn::Or(fields, hn::Set(u32, 0x7F800000U));  // and NaN
      const auto top = hn::Set(u32, 0x0F800000U);                       // the largest exponent, where fields has it
      return hn::BitCast(F32(), hn::Or(sign, hn::IfThenElse(hn::Eq(hn::And(fields, top), top), infinite, finite)));
    }
  }
  static HWY_INLINE Vec load(const Storage* p) { return widen(hn::LoadU(BitsTag(), p)); }
  static HWY_INLINE Vec load_first(const Storage* p, std::int32_t n) { return widen(load_first_lanes(BitsTag(), p, n)); }
  static float get(Storage x) { return to_float(Half{x}); }
  static Storage put(float x) { return from_float<Half>(x).bits; }
};

template <>
struct Element<BFloat16> {
  using Storage = std::uint16_t;
  static constexpr bool kPairs = HWY_TARGET != HWY_SCALAR;
  static constexpr bool kStoresVectors = HWY_TARGET != HWY_SCALAR;
  using BitsTag = hn::Rebind<std::uint16_t, F32>;
  /// Round to nearest even by integers, as from_float() does: add half of what is cut off, less one where the result is even.
  static HWY_INLINE void store(Vec x, Storage* p) {
    const auto bits = hn::BitCast(U32(), x);
    const auto is_odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(U32(), 1));
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(is_odd, hn::Set(U32(), 0x7FFF))));
    const auto quiet_nan = hn::Or(hn::ShiftRight<16>(bits), hn::Set(U32(), 0x40));
    const auto is_nan = hn::RebindMask(U32(), hn::IsNaN(x));
    hn::StoreU(hn::DemoteTo(BitsTag(), hn::BitCast(I32(), hn::IfThenElse(is_nan, quiet_nan, rounded))), BitsTag(), p);
  }
  static HWY_INLINE Vec widen(hn::Vec<BitsTag> bits) { return hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(U32(), bits))); }
  static HWY_INLINE Vec load(const Storage* p) { return widen(hn::LoadU(BitsTag(), p)); }
  static HWY_INLINE Vec load_first(const Storage* p, std::int32_t n) { return widen(load_first_lanes(BitsTag(), p, n)); }
  /// Elements 0, 2, 4, ... and 1, 3, 5, ... of the next 2 kLanes.
  static HWY_INLINE Vec load_even(const Storage* p) { return hn::BitCast(F32(), hn::ShiftLeft<16>(load_words(p))); }
  static HWY_INLINE Vec load_odd(const Storage* p) {
    return hn::BitCast(F32(), hn::And(load_words(p), hn::Set(U32(), 0xFFFF0000U)));
  }
  static HWY_INLINE hn::Vec<U32> load_words(const Storage* p) {
    return hn::LoadU(U32(), reinterpret_cast<const std::uint32_t*>(p));
  }
  static float get(Storage x) { return to_float(BFloat16{x}); }
  static Storage put(float x) { return from_float<BFloat16>(x).bits; }
};

/// fp8: the fields move to their places in an fp16, which keeps subnormal values out of fp32's slow range.
template <>
struct Element<Float8E4M3> {
  using Storage = std::uint8_t;
  static constexpr bool kPairs = false;
  using BitsTag = hn::Rebind<std::uint8_t, F32>;
  using HalfBits = Element<Half>::BitsTag;
  static HWY_INLINE Vec widen(hn::Vec<BitsTag> bits) {
    const HalfBits u16;
    const auto wide = hn::PromoteTo(u16, bits);
    const auto sign = hn::ShiftLeft<8>(hn::And(wide, hn::Set(u16, 0x80)));
    const auto fields = hn::ShiftLeft<7>(hn::And(wide, hn::Set(u16, 0x7F)));
    const auto half = hn::IfThenElse(hn::Eq(fields, hn::Set(u16, 0x3F80)), hn::Set(u16, 0x7E00), fields);
    return hn::Mul(Element<Half>::widen(hn::Or(sign, half)), hn::Set(F32(), 256.0F));
  }
  static HWY_INLINE Vec load(const Storage* p) { return widen(hn::LoadU(BitsTag(), p)); }
  static HWY_INLINE Vec load_first(const Storage* p, std::int32_t n) { return widen(load_first_lanes(BitsTag(), p, n)); }
  static float get(Storage x) { return to_float(Float8E4M3{x}); }
};

template <>
struct Element<Float8E5M2> {
  using Storage = std::uint8_t;
  static constexpr bool kPairs = false;
  using BitsTag = hn::Rebind<std::uint8_t, F32>;
  static HWY_INLINE Vec widen(hn::Vec<BitsTag> bits) {
    return Element<Half>::widen(hn::ShiftLeft<8>(hn::PromoteTo(Element<Half>::BitsTag(), bits)));
  }
  static HWY_INLINE Vec load(const Storage* p) { return widen(hn::LoadU(BitsTag(), p)); }
  static HWY_INLINE Vec load_first(const Storage* p, std::int32_t n) { return widen(load_first_lanes(BitsTag(), p, n)); }
  static float get(Storage x) { return to_float(Float8E5M2{x}); }
};

template <typename T>
using StorageOf = typename Element<T>::Storage;

template <typename T>
const StorageOf<T>* token_row(const TokenRows& rows, std::int32_t token) {
  return reinterpret_cast<const StorageOf<T>*>(rows.row(token));
}

/// One of the two vectors that 2 kLanes elements make: the even and the odd ones of bf16, else the first and the second half.
template <typename T, int kWhich>
HWY_INLINE Vec load_of_pair(const StorageOf<T>* p) {
  if constexpr (!Element<T>::kPairs)
    return Element<T>::load(p + kWhich * kLanes);
  else if constexpr (kWhich == 0)
    return Element<T>::load_even(p);
  else
    return Element<T>::load_odd(p);
}

}  // namespace
}  // namespace lean::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
