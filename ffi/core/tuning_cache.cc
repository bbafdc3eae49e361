#include "core/tuning_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <utility>

#include "core/hash.h"

namespace jax_overlap {
namespace {

std::string Checksum(const std::string& text) {
  uint64_t hash = kHashSeed;
  for (const char c : text) hash = MixedByte(hash, static_cast<unsigned char>(c));
  char digits[17];
  std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(hash));
  return digits;
}

void MakeFolders(const std::string& path) {
  for (size_t i = path.find('/', 1); i != std::string::npos; i = path.find('/', i + 1)) {
    mkdir(path.substr(0, i).c_str(), 0777);
  }
}

}  // namespace

TuningCache::TuningCache(std::string path) : path_(std::move(path)) {
  if (path_.empty()) return;
  std::ifstream file(path_);
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find('\t'), second = line.find('\t', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string entry = line.substr(0, second);
    if (line.substr(second + 1) != Checksum(entry)) continue;
    values_[entry.substr(0, first)] = entry.substr(first + 1);
  }
}

std::string TuningCache::Get(const std::string& key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? "" : found->second;
}

void TuningCache::Put(const std::string& key, const std::string& value) {
  std::string& kept = values_[key];
  if (kept == value) return;
  kept = value;
  if (path_.empty()) return;
  MakeFolders(path_);
  const int file = open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (file < 0) return;
  // A line at once, so that those of several processes do not mix; begun anew, as the last
  // one there may have been cut short.
  const std::string entry = key + '\t' + value;
  const std::string line = '\n' + entry + '\t' + Checksum(entry) + '\n';
  if (write(file, line.data(), line.size()) < 0) {
    // Read-only or full: the value is in memory.
  }
  close(file);
}

}  // namespace jax_overlap
