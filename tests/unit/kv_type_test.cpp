#include "base/kv_type.hpp"

#include <gtest/gtest.h>

namespace lean {
namespace {

/// What scales a type, and what it is multiplied as, agree with what the interface says of it: K and V of another type than the
/// queries are those with scales, and no product is of a narrower type than the elements.
TEST(KvType, EveryTypeHasARow) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    const KvType type = kv_type_of(dtype);
    EXPECT_EQ(type.dtype, dtype);
    EXPECT_EQ(type.bytes, bytes_of(dtype));
    EXPECT_EQ(type.scaled, type.bytes == 1);
    EXPECT_EQ(type.converted(), type.product != dtype);
    EXPECT_GE(bytes_of(type.product), type.bytes);
  }
  EXPECT_EQ(kv_type_of(static_cast<DType>(99)).bytes, 0);
}

}  // namespace
}  // namespace lean
