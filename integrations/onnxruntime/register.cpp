// What ONNX Runtime calls when the library is given to SessionOptions.register_custom_ops_library().
#include <cstdio>
#include <optional>
#include <string>

#include "integrations/runtime/device.hpp"
#include "ops.hpp"

namespace lean::ort {
namespace {

/// Session config entry: "1" puts the operators under the built-in names too, so that models are served as they are.
constexpr const char* kOverrideKey = "lean_attention.override";

/// Session config entry, for add_unknown(): what this runtime's operators have and ours do not know. Python's register() compares the
/// two; a host that gives it, "" if there is nothing, answers for that.
constexpr const char* kUnknownKey = "lean_attention.unknown";

/// Older ones lack functions that are called here.
constexpr int kOldestMinor = 22;

/// The newest whose operators were looked at: newer ones may have attributes that would be passed over without a word.
constexpr int kNewestMinor = 32;

/// Older ones look behind the end of a node's outputs, or at an input that is not there, while they ask a custom operator for
/// shapes: it is not asked there.
constexpr int kOldestInferringMinor = 28;

/// 0 of another major version than 1, and of what is no version.
int minor_of(const char* version) {
  int major = 0;
  int minor = 0;
  return std::sscanf(version, "%d.%d", &major, &minor) == 2 && major == 1 ? minor : 0;
}

/// Lives as long as the process: a session may outlive the options that it was made with.
OrtCustomOpDomain* new_domain(const char* name, bool infers, std::initializer_list<Ops> all) {
  OrtCustomOpDomain* domain = nullptr;
  check(api().CreateCustomOpDomain(name, &domain));
  for (const Ops& both : all) {
    const OpsOfProviders& ops = infers ? both.inferring : both.typed;
    for (const OrtCustomOp* op : ops.cpu) check(api().CustomOpDomain_Add(domain, op));
    for (const OrtCustomOp* op : ops.cuda)
      if (runtime::device::built()) check(api().CustomOpDomain_Add(domain, op));
  }
  return domain;
}

/// Nothing where there is no such entry.
std::optional<std::string> config_entry(const OrtSessionOptions& options, const char* key) {
  int has = 0;
  check(api().HasSessionConfigEntry(&options, key, &has));
  if (has == 0) return {};
  std::size_t bytes = 0;
  OrtStatus* const status = api().GetSessionConfigEntry(&options, key, nullptr, &bytes);
  api().ReleaseStatus(status);
  std::string value(bytes, '\0');
  check(api().GetSessionConfigEntry(&options, key, value.data(), &bytes));
  value.resize(value.find('\0') == std::string::npos ? value.size() : value.find('\0'));
  return value;
}

bool asks_for_override(const OrtSessionOptions& options) {
  const std::string value = config_entry(options, kOverrideKey).value_or("0");
  demand(value == "0" || value == "1", kOverrideKey, " = \"", value, "\": allowed \"0\" and \"1\"");
  return value == "1";
}

void register_ops(OrtSessionOptions& options, int minor) {
  const bool infers = minor >= kOldestInferringMinor;
  static OrtCustomOpDomain* const own =
      new_domain("lean_attention", infers, {group_query_attention(), attention(), multi_head_attention(), paged_attention()});
  static OrtCustomOpDomain* const microsoft =
      new_domain("com.microsoft", infers, {group_query_attention(), multi_head_attention(), paged_attention()});
  static OrtCustomOpDomain* const onnx = new_domain("", infers, {built_in_attention()});
  const std::optional<std::string> unknown = config_entry(options, kUnknownKey);
  if (unknown) add_unknown(*unknown);
  check(api().AddCustomOpDomain(&options, own));
  if (!asks_for_override(options)) return;
  do_not(minor > kNewestMinor && !unknown, kOverrideKey, " = \"1\" with ONNX Runtime 1.", minor,
         ": its operators are known up to 1.", kNewestMinor, ", and a newer attribute would be passed over; allowed with ",
         kUnknownKey, ", which names those that are not known here (\"\": none); Python's lean_attention.ort.register() gives it");
  check(api().AddCustomOpDomain(&options, microsoft));
  check(api().AddCustomOpDomain(&options, onnx));
}

}  // namespace
}  // namespace lean::ort

extern "C" __attribute__((visibility("default"))) OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options,
                                                                                            const OrtApiBase* base) {
  using namespace lean::ort;
  const char* const version = base->GetVersionString();
  const int minor = minor_of(version);
  const OrtApi* const api = minor >= kOldestMinor ? base->GetApi(kApiVersion) : nullptr;
  if (api == nullptr) {
    const std::string message =
        text("lean_attention: this is ONNX Runtime ", version, ": allowed 1.", kOldestMinor, " and newer versions of 1");
    return base->GetApi(1)->CreateStatus(ORT_NOT_IMPLEMENTED, message.c_str());
  }
  set_api(*api);
  return guarded("lean_attention: ", [&] { register_ops(*options, minor); });
}
