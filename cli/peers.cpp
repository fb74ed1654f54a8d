#include "cli/peers.hpp"

#include <fmt/format.h>

#include <fstream>

#include "cli/bad_argument.hpp"
#include "cli/problem_json.hpp"

namespace lean::cli {
namespace {

/// Layouts and pages are the library's own choice: each peer is taken at its best. `kv_dtype`: as in the file, where fp8 is E4M3.
Json key_of(const Json& lens, std::int32_t q_heads, std::int32_t kv_heads, std::int32_t head_dim, const std::string& kv_dtype) {
  return Json::array({lens, q_heads, kv_heads, head_dim, kv_dtype});
}

std::string key_of(const Json& line) {
  const std::string dtype = line.at("dtype");
  return key_of(line.at("lens"), line.at("q_heads"), line.at("kv_heads"), line.at("head_dim"), line.value("kv_dtype", dtype))
      .dump();
}

double number_or_zero(const Json& line, const char* name) {
  return line.contains(name) && line[name].is_number() ? line[name].get<double>() : 0.0;
}

}  // namespace

Peers::Peers(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw BadArgument("--peers", path, "a file that can be read");
  std::string text;
  for (int number = 1; std::getline(file, text); ++number) {
    if (text.empty()) continue;
    try {
      const Json line = Json::parse(text);
      const PeerTime peer{
          .impl = line.at("impl"), .us = number_or_zero(line, "us"), .ceiling_us = number_or_zero(line, "ceiling_us")};
      device_ = line.value("device", device_);
      if (peer.us <= 0.0) continue;  // did not run
      const auto [place, is_new] = best_.try_emplace(key_of(line), peer);
      if (!is_new && peer.us < place->second.us) place->second = peer;
    } catch (const Json::exception& error) {
      throw BadArgument("--peers", path, fmt::format("line {} is not of a result file: {}", number, error.what()));
    }
  }
}

const PeerTime* Peers::best(const ProblemSpec& spec) const {
  if (spec.q_tokens != 1 || best_.empty()) return nullptr;
  const std::string kv_dtype = spec.kv_type() == DType::kFloat8E4M3 ? "fp8" : name_of(spec.kv_type());
  const auto found = best_.find(key_of(Json(spec.kv_lens), spec.q_heads, spec.kv_heads, spec.head_dim, kv_dtype).dump());
  return found == best_.end() ? nullptr : &found->second;
}

}  // namespace lean::cli
