// Request lengths from a trace: the preset that ships with the command, or a CSV with the columns
// TIMESTAMP,ContextTokens,GeneratedTokens, as the Azure LLM inference traces have.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lean::cli {

/// 32 context lengths of the Azure LLM inference trace 2023, conversations: every 605th of its 19,366 requests, what
/// `--trace AzureLLMInferenceTrace_conv.csv --batch 32` picks too.
[[nodiscard]] std::vector<std::int32_t> conv32_lengths();

enum class Pick : std::int32_t { kSpread, kFirst };

/// Context lengths of `count` requests of the file: every k-th, or the first ones; 0: all. Throws BadArgument.
[[nodiscard]] std::vector<std::int32_t> trace_lengths(const std::string& path, std::int64_t count, Pick pick);

/// `count` of `all`: every floor(all / count)-th, or the first ones.
[[nodiscard]] std::vector<std::int32_t> pick_lengths(const std::vector<std::int32_t>& all, std::int64_t count, Pick pick);

}  // namespace lean::cli
