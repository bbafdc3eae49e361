// Errors that must not get lost.
//
// JAX drops the error of a result that nobody reads. So each error of an op is
// also kept here until it is acknowledged: Python raises it at the next call, and
// a process that ends with unacknowledged errors prints them and does not exit 0.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace jax_overlap {

class Ledger {
 public:
  static Ledger& Get();
  // The one that Get gives from now on: modules of one process share a ledger.
  static void Use(Ledger* ledger);

  void Record(const std::string& text);
  // The oldest errors first; those beyond `kKept` are only counted.
  std::vector<std::string> Texts();
  void Clear();
  // How often it was cleared.
  int generation() const { return generation_.load(); }
  // `look` is called before the texts are read: where errors do not come by themselves.
  void AddSource(std::function<void()> look);
  // Reports at process exit what is unacknowledged then. Call once.
  void ReportAtExit();

  static constexpr size_t kKept = 32;
  static constexpr int kExitCode = 70;  // EX_SOFTWARE of sysexits.h

 private:
  void Look();

  std::mutex mutex_;
  std::vector<std::string> texts_;
  std::vector<std::function<void()>> sources_;
  std::atomic<int> generation_{0};
  size_t dropped_ = 0;
};

}  // namespace jax_overlap
