// Every precondition of Options, and what the API makes of options before a backend sees them.
#include "api/option_preconditions.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "precondition_checks.hpp"

namespace lean {
namespace {

using Breaker = support::Breaker<Options>;

const std::vector<Breaker>& breakers() {
  static const std::vector<Breaker> kBreakers = {
      {"options.backend", "0 (cpu)", [](Options& o) { o.backend = static_cast<Backend>(-1); }},
      {"options.backend", "0 (cpu)", [](Options& o) { o.backend = static_cast<Backend>(2); }},
      {"options.policy.kind", "0 (lean)", [](Options& o) { o.policy.kind = static_cast<Policy::Kind>(-1); }},
      {"options.policy.kind", "0 (lean)", [](Options& o) { o.policy.kind = static_cast<Policy::Kind>(4); }},
      {"options.policy.splits", "with fixed_split, else 0", [](Options& o) { o.policy.splits = 1; }},
      {"options.policy.splits", "with fixed_split, else 0", [](Options& o) { o.policy = Policy::fixed_split(-1); }},
      {"options.policy.splits", "with fixed_split, else 0", [](Options& o) { o.policy = Policy::fixed_split(129); }},
      {"options.policy.chunk_tokens", "with fixed_chunk, else 0", [](Options& o) { o.policy.chunk_tokens = 64; }},
      {"options.policy.chunk_tokens", "with fixed_chunk, else 0", [](Options& o) { o.policy = Policy::fixed_chunk(-1); }},
      {"options.fixup", "0 (last_arriver)", [](Options& o) { o.fixup = static_cast<Fixup>(-1); }},
      {"options.fixup", "0 (last_arriver)", [](Options& o) { o.fixup = static_cast<Fixup>(3); }},
      {"options.determinism", "0 (run_to_run)", [](Options& o) { o.determinism = static_cast<Determinism>(-1); }},
      {"options.determinism", "0 (run_to_run)", [](Options& o) { o.determinism = static_cast<Determinism>(3); }},
      {"options.determinism", "batch_invariant needs",
       [](Options& o) {
         o.determinism = Determinism::kBatchInvariant;
         o.policy = Policy::data_parallel();
       }},
      {"options.determinism", "batch_invariant needs",
       [](Options& o) {
         o.determinism = Determinism::kBatchInvariant;
         o.policy = Policy::fixed_split(4);
       }},
      {"options.workers", "0 (all) to 4096", [](Options& o) { o.workers = -1; }},
      {"options.workers", "0 (all) to 4096", [](Options& o) { o.workers = 4097; }},
      {"options.cpu_isa", "0 (best) to 6", [](Options& o) { o.cpu_isa = static_cast<CpuIsa>(-1); }},
      {"options.cpu_isa", "0 (best) to 6", [](Options& o) { o.cpu_isa = static_cast<CpuIsa>(7); }},
  };
  return kBreakers;
}

TEST(OptionPreconditions, EveryRowHasABreakerAndEveryBreakerARow) {
  support::expect_breakers_and_rows_match(option_preconditions(), Options{}, breakers());
}

TEST(OptionPreconditions, ARefusalNamesArgumentValueAndWhatIsAllowed) {
  support::expect_refusals_explain_themselves(option_preconditions(), Options{}, breakers());
}

TEST(OptionPreconditions, WhatLiesJustInsideIsAllowed) {
  const std::vector<Options> allowed = {
      {.backend = Backend::kCuda},
      {.policy = Policy::fixed_split(1)},
      {.policy = Policy::fixed_split(Policy::kMaxSplits)},
      {.policy = Policy::fixed_chunk(1)},
      {.policy = Policy::fixed_chunk(INT32_MAX)},
      {.fixup = Fixup::kHostBlock, .determinism = Determinism::kNotGuaranteed},
      {.policy = Policy::fixed_chunk(), .determinism = Determinism::kBatchInvariant},
      {.workers = 4096, .cpu_isa = CpuIsa::kAmxBf16},
  };
  for (const Options& options : allowed) {
    const Status status = option_preconditions().check(options);
    EXPECT_TRUE(status.ok()) << status.message;
  }
}

TEST(OptionPreconditions, BatchInvariantWithTheDefaultPolicyMeansFixedChunk) {
  const Options resolved = resolve({.determinism = Determinism::kBatchInvariant});
  EXPECT_EQ(resolved.policy.kind, Policy::Kind::kFixedChunk);
  EXPECT_EQ(resolved.policy.chunk_tokens, 0);
  EXPECT_EQ(resolve({.policy = Policy::fixed_chunk(96), .determinism = Determinism::kBatchInvariant}).policy.chunk_tokens, 96);
  EXPECT_EQ(resolve({}).policy.kind, Policy::Kind::kLean);
  EXPECT_EQ(resolve({.determinism = Determinism::kNotGuaranteed}).policy.kind, Policy::Kind::kLean);
}

}  // namespace
}  // namespace lean
