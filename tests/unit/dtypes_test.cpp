// The list of element types against every other place that numbers, sizes or names them.
#include "lean/dtypes.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <set>
#include <string>
#include <type_traits>

#include "base/kv_type.hpp"
#include "base/with_type.hpp"
#include "lean/lean.h"
#include "lean/lean.hpp"
#include "problem/preconditions.hpp"

namespace lean {
namespace {

constexpr auto kNoType = static_cast<DType>(kDTypeCount);

TEST(DTypes, ListsHoldEveryTypeOnceThoseOfQueriesFirst) {
  std::set<std::string> names;
  for (std::size_t i = 0; i < kAllDTypes.size(); ++i) {
    const DType dtype = kAllDTypes[i];
    const DTypeTraits traits = traits_of(dtype);
    EXPECT_EQ(static_cast<std::size_t>(dtype), i);
    EXPECT_EQ(traits.bytes, bytes_of(dtype)) << traits.name;
    EXPECT_EQ(dtype, i < kQueryDTypes.size() ? kQueryDTypes[i] : kScaledDTypes[i - kQueryDTypes.size()]);
    EXPECT_EQ(traits.of_queries(), i < kQueryDTypes.size()) << traits.name;
    EXPECT_EQ(traits.scaled, i >= kQueryDTypes.size()) << traits.name;
    EXPECT_TRUE(names.insert(traits.name).second && names.insert(traits.short_name).second) << traits.name;
  }
  EXPECT_EQ(traits_of(kNoType).bytes, 0);
  EXPECT_EQ(bytes_of(kNoType), 0);
  EXPECT_FALSE(traits_of(kNoType).of_queries());
}

TEST(DTypes, NumbersAreThoseOfTheCInterface) {
  const lean_dtype numbers[] = {LEAN_FLOAT32, LEAN_FLOAT16, LEAN_BFLOAT16, LEAN_FLOAT8_E4M3, LEAN_FLOAT8_E5M2};
  const DType values[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2};
  ASSERT_EQ(std::size(numbers), kAllDTypes.size());
  for (std::size_t i = 0; i < kAllDTypes.size(); ++i) EXPECT_EQ(static_cast<int>(numbers[i]), static_cast<int>(values[i])) << i;
}

TEST(DTypes, StorageIsOfEveryTypesSizeAndOfNoOtherType) {
  for (const DType dtype : kAllDTypes) {
    std::size_t all = 0;
    std::size_t of_queries = 0;
    with_type(dtype, [&]<typename T>(T x) { all = sizeof(x); });
    with_query_type(dtype, [&]<typename T>(T x) { of_queries = sizeof(x); });
    EXPECT_EQ(static_cast<std::int64_t>(all), bytes_of(dtype)) << traits_of(dtype).name;
    EXPECT_EQ(of_queries, traits_of(dtype).of_queries() ? all : 0) << traits_of(dtype).name;
  }
  bool called = false;
  with_type(kNoType, [&](auto) { called = true; });
  with_query_type(kNoType, [&](auto) { called = true; });
  EXPECT_FALSE(called);
}

/// What scales a type, and what it is multiplied as: no product is of a narrower type than the elements, none of a scaled type, and
/// kernels that read several types read them at one size.
TEST(DTypes, KernelsKnowEveryTypeOfKAndV) {
  for (const DType dtype : kAllDTypes) {
    const KvType type = kv_type_of(dtype);
    EXPECT_EQ(type.dtype, dtype);
    EXPECT_EQ(type.bytes, bytes_of(dtype));
    EXPECT_EQ(type.scaled, traits_of(dtype).scaled);
    EXPECT_EQ(type.converted(), type.scaled);
    EXPECT_GE(bytes_of(type.product), type.bytes);
    EXPECT_TRUE(traits_of(type.product).of_queries());
    EXPECT_EQ(kernels_of(kernels_of(dtype)), kernels_of(dtype));
    EXPECT_EQ(bytes_of(kernels_of(dtype)), type.bytes);
  }
  EXPECT_EQ(kv_type_of(kNoType).bytes, 0);
}

std::string names_of_queries() {
  std::string names;
  for (const DType dtype : kQueryDTypes) names += (names.empty() ? "" : ", ") + std::string(traits_of(dtype).name);
  return names;
}

/// Texts of refusals are constants: they must say what the list says.
TEST(DTypes, RefusalsNameEveryTypeThatIsAllowed) {
  const float lse = 0.0F;
  float o = 0.0F;
  float o_lse = 0.0F;
  const Status merged = merge_states(&o, &o_lse, &o, &lse, 1, 1, kNoType, {});
  EXPECT_NE(std::string(merged.message).find("allowed " + names_of_queries()), std::string::npos) << merged.message;

  Problem problem{.batch = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 1};
  problem.q.dtype = kNoType;
  const Status refused = problem_preconditions().check(problem);
  EXPECT_NE(std::string(refused.message).find("q.dtype"), std::string::npos) << refused.message;
  EXPECT_NE(std::string(refused.message).find("allowed " + names_of_queries()), std::string::npos) << refused.message;
}

}  // namespace
}  // namespace lean
