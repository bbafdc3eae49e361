#include "core/ledger.h"

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "core/mutants.h"

#if defined(__linux__)
#include <unistd.h>
#endif

namespace jax_overlap {

namespace {

Ledger*& Current() {
  static Ledger* ledger = new Ledger;  // outlives every thread that may record
  return ledger;
}

}  // namespace

Ledger& Ledger::Get() { return *Current(); }

void Ledger::Use(Ledger* ledger) { Current() = ledger; }

void Ledger::AddSource(std::function<void()> look) {
  std::lock_guard<std::mutex> lock(mutex_);
  sources_.push_back(std::move(look));
}

void Ledger::Look() {
  std::vector<std::function<void()>> sources;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    sources = sources_;
  }
  for (const std::function<void()>& look : sources) look();
}

void Ledger::Record(const std::string& text) {
  if (JO_MUTANT("error_swallowed")) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (texts_.size() < kKept) {
    texts_.push_back(text);
  } else {
    ++dropped_;
  }
}

std::vector<std::string> Ledger::Texts() {
  Look();
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::string> texts = texts_;
  if (dropped_ > 0) texts.push_back("... and " + std::to_string(dropped_) + " more errors");
  return texts;
}

void Ledger::Clear() {
  Look();  // what is known by now is acknowledged
  std::lock_guard<std::mutex> lock(mutex_);
  ++generation_;
  texts_.clear();
  dropped_ = 0;
}

#if defined(__linux__)
void Ledger::ReportAtExit() {
  // After Python has ended, so that it sees all errors and disturbs no other
  // handler; on_exit knows the exit code, which an earlier failure keeps.
  on_exit(
      [](int code, void*) {
        const std::vector<std::string> texts = Get().Texts();
        if (texts.empty()) return;
        std::fprintf(stderr, "jax_overlap: %zu error(s) that nobody acknowledged:\n", texts.size());
        for (const std::string& text : texts) std::fprintf(stderr, "  %s\n", text.c_str());
        std::fprintf(stderr, "(jax_overlap.clear_errors() acknowledges errors.)\n");
        std::fflush(nullptr);
        if (code == 0) _exit(kExitCode);
      },
      nullptr);
}
#else
void Ledger::ReportAtExit() {}  // on_exit is glibc's; elsewhere Python's report has to do
#endif

}  // namespace jax_overlap
