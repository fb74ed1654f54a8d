#include "cli/backend_option.hpp"

#include <CLI/CLI.hpp>

#include "cli/bad_argument.hpp"
#include "cli/choice.hpp"
#include "cli/gpu.hpp"

namespace lean::cli {
namespace {

const Choices<Backend> kBackends{{"cpu", Backend::kCpu}, {"cuda", Backend::kCuda}};

constexpr std::int32_t kOldestMajor = 8;  // compute capability that the CUDA backend asks for

}  // namespace

void BackendOption::add_to(CLI::App& app, const std::string& by_default) {
  app.add_option_function<std::string>(
         "--backend",
         [this](const std::string& text) {
           for (const auto& [name, backend] : kBackends) {
             if (name == text) asked_ = backend;
           }
           if (!asked_) throw BadArgument("--backend", text, "one of " + names_of(kBackends, ", "));
         },
         "Where to run; by default " + by_default)
      ->type_name(names_of(kBackends, "|"))
      ->group("Call");
}

Backend BackendOption::backend_or(Backend fallback) const {
  const Backend backend = asked_.value_or(fallback);
  if (backend == Backend::kCuda && gpu::devices().empty()) throw BadArgument("--backend", "cuda", gpu::why_none());
  return backend;
}

const char* name_of(Backend backend) { return backend == Backend::kCuda ? "cuda" : "cpu"; }

Backend best_backend() {
  const std::vector<gpu::Device> gpus = gpu::devices();
  return !gpus.empty() && gpus[0].major >= kOldestMajor ? Backend::kCuda : Backend::kCpu;
}

}  // namespace lean::cli
