// What the runtime's own operators have and ours do not know, and nodes that use it.
#include <mutex>
#include <set>
#include <sstream>

#include "ort.hpp"

namespace lean::ort {
namespace {

/// Words of add_unknown().
class Unknown {
 public:
  void add(const std::string& words) {
    std::istringstream stream(words);
    const std::lock_guard lock(mutex_);
    for (std::string word; stream >> word;) words_.insert(word);
  }
  /// What follows `begin` in the words that begin with it.
  [[nodiscard]] std::vector<std::string> after(const std::string& begin) {
    std::vector<std::string> found;
    const std::lock_guard lock(mutex_);
    for (const std::string& word : words_)
      if (word.starts_with(begin)) found.push_back(word.substr(begin.size()));
    return found;
  }

 private:
  std::mutex mutex_;
  std::set<std::string> words_;
};
Unknown& unknown() {
  static Unknown words;
  return words;
}

}  // namespace

void add_unknown(const std::string& words) { unknown().add(words); }

std::string unknown_definition(const std::string& op) {
  const std::vector<std::string> opsets = unknown().after(op + "@");
  return opsets.empty() ? "" : opsets.front();
}

void Node::refuse_unknown(const std::string& op) const {
  for (const std::string& name : unknown().after(op + ".")) {
    std::int64_t value = 0;  // of another type it is there too
    OrtStatus* const status = api().KernelInfoGetAttribute_int64(&info_, name.c_str(), &value);
    const bool there = status == nullptr || std::string(api().GetErrorMessage(status)).find("No attribute") == std::string::npos;
    api().ReleaseStatus(status);
    do_not(there, name, ": ", op, " has no such attribute here");
  }
}

}  // namespace lean::ort
