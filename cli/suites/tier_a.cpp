// Tier a: the 34 rows that other libraries were measured on, named as in their result file, each in the suite it is an example of.
#include "cli/suites/declarations.hpp"

namespace lean::cli::suites {
namespace {

class TierA {
 public:
  explicit TierA(Matrix& matrix) : matrix_(matrix) {}

  void paper(const char* id, std::int32_t batch, std::int32_t heads, std::int32_t tokens, std::int32_t dim = 64) {
    add(Suite::kPaper, id, uniform(batch, tokens), {heads, heads, dim}, DType::kFloat16);
  }
  void model(const char* id, std::int32_t batch, std::int32_t tokens, const Heads& heads, DType dtype = DType::kBFloat16) {
    add(Suite::kModels, id, uniform(batch, tokens), heads, dtype);
  }
  void ragged(const char* id, Lengths lengths, const Heads& heads) {
    add(Suite::kRagged, id, std::move(lengths), heads, DType::kBFloat16);
  }

 private:
  void add(Suite suite, const char* id, Lengths lengths, const Heads& heads, DType dtype) {
    matrix_.begin(suite, Tier::kA);
    matrix_.add_as(id, decode_of(std::move(lengths), heads, dtype));
  }

  Matrix& matrix_;
};

}  // namespace

void add_tier_a(Matrix& matrix) {
  TierA rows(matrix);
  rows.paper("P1 4x32x1k", 4, 32, 1 * k);
  rows.paper("P2 4x32x16k", 4, 32, 16 * k);
  rows.paper("P3 4x32x256k", 4, 32, 256 * k);
  rows.paper("P8 2x56x256k", 2, 56, 256 * k);
  rows.paper("P10 1x56x64k", 1, 56, 64 * k);
  rows.paper("P12 6x48x4k", 6, 48, 4 * k);
  rows.paper("P13 6x48x64k", 6, 48, 64 * k);
  rows.paper("P15 6x12x64k", 6, 12, 64 * k);
  rows.paper("P18 6x56x64k", 6, 56, 64 * k);
  rows.paper("P24 1x32x8k d128", 1, 32, 8 * k, 128);
  rows.paper("P25 1x32x128k d128", 1, 32, 128 * k, 128);
  rows.model("L8B 1x1k", 1, 1 * k, kLlama8B);
  rows.model("L8B 1x8k", 1, 8 * k, kLlama8B);
  rows.model("L8B 1x32k", 1, 32 * k, kLlama8B);
  rows.model("L8B 1x128k", 1, 128 * k, kLlama8B);
  rows.model("L8B 8x8k", 8, 8 * k, kLlama8B);
  rows.model("L8B 32x4k", 32, 4 * k, kLlama8B);
  rows.model("L8B 34x16k", 34, 16 * k, kLlama8B);
  rows.model("L8B 64x8k", 64, 8 * k, kLlama8B);
  rows.model("70B/8 1x128k", 1, 128 * k, kLlama70BSlice);
  rows.model("70B/8 16x32k", 16, 32 * k, kLlama70BSlice);
  rows.model("70B 8x32k", 8, 32 * k, kLlama70B);
  rows.model("Phi3m 1x8k", 1, 8 * k, kPhi3Medium);
  rows.model("Phi3m 1x128k", 1, 128 * k, kPhi3Medium);
  rows.model("Phi3m 27x16k", 27, 16 * k, kPhi3Medium);
  rows.model("MHA 9x16k d128", 9, 16 * k, kMha, DType::kFloat16);
  rows.model("OSS 1x128k d64", 1, 128 * k, kGptOss);
  rows.ragged("R1 128k+63x1k", one_long(128 * k, 63, 1 * k), kLlama8B);
  rows.ragged("R2 128k+31x2k", one_long(128 * k, 31, 2 * k), kLlama8B);
  rows.ragged("R4 linear 1k..32k", linear(32, 1 * k), kLlama8B);
  rows.ragged("R5 zipf128", zipf(128, 128 * k, 1 * k), kLlama8B);
  rows.ragged("R6 64k+15x2k phi", one_long(64 * k, 15, 2 * k), kPhi3Medium);
  rows.ragged("R8 64k+7x2k MHA", one_long(64 * k, 7, 2 * k), kMha);
  rows.ragged("R11 256k+63x4k", one_long(256 * k, 63, 4 * k), kQwen3);
}

}  // namespace lean::cli::suites
