// What was measured once, kept in a file: a line for each key, with a checksum.
//
// A file that cannot be read, or lines of it that are damaged, count as absent; one that
// cannot be written is no error: what was measured then lasts as long as the process.
// Processes may share a file. They add lines, and the last line of a key counts.
#pragma once

#include <map>
#include <string>

namespace jax_overlap {

class TuningCache {
 public:
  // Without a path nothing is kept.
  explicit TuningCache(std::string path);

  // Empty if the key is not there. Keys and values are without tabs and line ends.
  std::string Get(const std::string& key) const;
  void Put(const std::string& key, const std::string& value);

 private:
  const std::string path_;
  std::map<std::string, std::string> values_;
};

}  // namespace jax_overlap
