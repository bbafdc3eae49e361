// Errors that must not get lost.
//
// JAX drops the error of a result that nobody reads. So each error of an op is
// also kept here until it is acknowledged: Python raises it at the next call, and
// a process that ends with unacknowledged errors prints them and does not exit 0.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace jax_overlap {

class Ledger {
 public:
  static Ledger& Get();

  void Record(const std::string& text);
  // The oldest errors first; those beyond `kKept` are only counted.
  std::vector<std::string> Texts() const;
  void Clear();
  // Reports at process exit what is unacknowledged then. Call once.
  void ReportAtExit();

  static constexpr size_t kKept = 32;
  static constexpr int kExitCode = 70;  // EX_SOFTWARE of sysexits.h

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> texts_;
  size_t dropped_ = 0;
};

}  // namespace jax_overlap
