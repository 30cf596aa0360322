// Rows that lie on disk: a scratch file, written in chunks of rows.
//
// A chunk is written at once, and its place is used again when its last row was released. Each row
// is followed by a checksum of its key and bytes. The file has no name, so that nothing of it is
// left however the process ends; and it is not mapped, because a full disk or a damaged file would
// then end the process by a signal, where pwrite and pread return what is wrong. Which of its pages
// lie in memory is up to the system.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ops/cc/lifecycle/status.h"

namespace ctr {

// Safe to use from several threads. A place is in [0, 2^31), and belongs to one row until Release.
class ColdFile {
 public:
  struct Row {
    int32_t place;
    int64_t key;
    int64_t index;  // the caller's own
  };

  // row_bytes: of a row without its checksum. InvalidArgument if `dir` cannot hold the file, or
  // lies on a network or in memory.
  static Status Open(const std::string& dir, int64_t row_bytes, std::unique_ptr<ColdFile>* file);
  ~ColdFile();
  ColdFile(const ColdFile&) = delete;
  ColdFile& operator=(const ColdFile&) = delete;

  int64_t rows_per_chunk() const { return int64_t{1} << bits_; }
  int32_t ChunkOf(int32_t place) const { return place >> bits_; }

  // Writes rows [keys.size(), row_bytes] to new chunks. ResourceExhausted if the disk is full;
  // nothing is kept then.
  Status Write(const std::vector<int64_t>& keys, const char* rows, std::vector<int32_t>* places);
  // Begins to fetch rows from the disk, all at the same time; Read then waits less.
  void Announce(std::vector<Row> rows) const;
  // Calls visit(row, its bytes) for each row, in the file's order. DataLoss if the file no longer
  // has what was written.
  Status Read(std::vector<Row> rows,
              const std::function<void(const Row&, const char* bytes)>& visit) const;
  void Release(int32_t place);

  int64_t size() const;  // how many rows the file holds
  // Which chunks are at most half full.
  std::vector<bool> SparseChunks() const;

 private:
  ColdFile(std::string dir, int fd, int64_t row_bytes);
  int64_t OffsetOf(int32_t place) const { return place * slot_bytes_; }
  // Sorts rows by place, announces them, and returns the ends of those that are read together.
  std::vector<size_t> Begin(std::vector<Row>* rows) const;

  const std::string dir_;
  const int fd_;
  const int64_t row_bytes_, slot_bytes_;
  int bits_ = 4;
  mutable std::mutex mutex_;   // guards what follows; a leaf: no other lock is taken under it
  std::vector<int32_t> rows_;  // of each chunk, how many rows are not released
  std::vector<int32_t> free_;  // chunks without rows
  int64_t size_ = 0;
};

}  // namespace ctr
