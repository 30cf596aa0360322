#include "ops/cc/rows/cold_file.h"

#include <fcntl.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "ops/cc/data/farmhash.h"
#include "ops/cc/lifecycle/hash.h"

namespace ctr {
namespace {

constexpr int64_t kChunkBytes = 64 << 10;
constexpr int64_t kGapBytes = 4 << 10;     // rows that lie no farther apart are read together
constexpr int64_t kReadBytes = 256 << 10;  // at most, by one call

uint32_t Checksum(int64_t key, const char* row, int64_t bytes) {
  return static_cast<uint32_t>(Mix64(static_cast<int64_t>(Fingerprint64(row, bytes)) ^ key));
}

// Returns the kind of a file system that other machines share, or that lies in memory; null for a
// local disk.
const char* NoLocalDisk(int64_t magic) {
  switch (static_cast<uint32_t>(magic)) {
    case 0x6969:
      return "NFS";
    case 0x517b:
    case 0xff534d42:
    case 0xfe534d42:
      return "SMB";
    case 0x0bd00bd0:
      return "Lustre";
    case 0x00c36400:
      return "Ceph";
    case 0x01021997:
      return "9P";
    case 0x47504653:
      return "GPFS";
    case 0x5346414f:
      return "AFS";
    case 0x65735546:
      return "FUSE";
    case 0x19830326:
      return "BeeGFS";
    case 0x01021994:
      return "tmpfs, in memory";
    case 0x858458f6:
      return "ramfs, in memory";
  }
  return nullptr;
}

}  // namespace

Status ColdFile::Open(const std::string& dir, int64_t row_bytes, std::unique_ptr<ColdFile>* file) {
  const auto wrong = [&](const std::string& found) {
    return Status::InvalidArgument("cold_dir: found " + dir + ", " + found +
                                   "; wanted a directory on a local disk");
  };
  std::string path = dir + "/rows-XXXXXX";
  const int fd = mkostemp(path.data(), O_CLOEXEC);
  if (fd < 0) return wrong(std::string("where no file can be made (") + std::strerror(errno) + ")");
  unlink(path.c_str());
  file->reset(new ColdFile(dir, fd, row_bytes));
  struct statfs system;
  const char* kind = fstatfs(fd, &system) == 0 ? NoLocalDisk(system.f_type) : nullptr;
  if (kind != nullptr) return wrong(std::string("which is on ") + kind);
  posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);  // Read knows what it reads next
  return Status();
}

ColdFile::ColdFile(std::string dir, int fd, int64_t row_bytes)
    : dir_(std::move(dir)),
      fd_(fd),
      row_bytes_(row_bytes),
      slot_bytes_(row_bytes + static_cast<int64_t>(sizeof(uint32_t))) {
  while ((slot_bytes_ << (bits_ + 1)) <= kChunkBytes) ++bits_;
}

ColdFile::~ColdFile() { close(fd_); }

Status ColdFile::Write(const std::vector<int64_t>& keys, const char* rows,
                       std::vector<int32_t>* places) {
  places->clear();
  std::vector<char> buffer;
  const int64_t n = keys.size();
  for (int64_t begin = 0; begin < n; begin += rows_per_chunk()) {
    const int64_t count = std::min(rows_per_chunk(), n - begin);
    buffer.resize(count * slot_bytes_);
    for (int64_t k = 0; k < count; ++k) {
      const char* const row = rows + (begin + k) * row_bytes_;
      const uint32_t sum = Checksum(keys[begin + k], row, row_bytes_);
      std::memcpy(&buffer[k * slot_bytes_], row, row_bytes_);
      std::memcpy(&buffer[k * slot_bytes_ + row_bytes_], &sum, sizeof(sum));
    }
    int64_t chunk = 0;
    std::string why;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (free_.empty() && rows_.size() >> (31 - bits_) == 0) {
        free_.push_back(static_cast<int32_t>(rows_.size()));
        rows_.push_back(0);
      }
      if (free_.empty()) {
        why = "the file has 2^31 places";
      } else {
        chunk = free_.back();
        free_.pop_back();
        rows_[chunk] = static_cast<int32_t>(count);
        size_ += count;
      }
    }
    for (int64_t k = 0; why.empty() && k < count; ++k)
      places->push_back(static_cast<int32_t>(chunk << bits_ | k));
    for (int64_t done = 0, bytes = buffer.size(); why.empty() && done < bytes;) {
      const ssize_t wrote =
          pwrite(fd_, &buffer[done], bytes - done, (chunk << bits_) * slot_bytes_ + done);
      if (wrote >= 0) done += wrote;
      if (wrote < 0 && errno != EINTR) why = std::strerror(errno);
    }
    if (why.empty()) continue;
    for (const int32_t place : *places) Release(place);
    places->clear();
    return Status::ResourceExhausted("cold_dir: " + dir_ + ": cannot write rows there: " + why);
  }
  return Status();
}

std::vector<size_t> ColdFile::Begin(std::vector<Row>* sorted) const {
  std::vector<Row>& rows = *sorted;
  std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.place < b.place; });
  std::vector<size_t> ends;
  for (size_t begin = 0; begin < rows.size(); begin = ends.back()) {
    const int64_t first = OffsetOf(rows[begin].place);
    size_t end = begin + 1;
    while (end < rows.size() &&
           OffsetOf(rows[end].place) - OffsetOf(rows[end - 1].place) <= kGapBytes + slot_bytes_ &&
           OffsetOf(rows[end].place) - first <= kReadBytes)
      ++end;
    ends.push_back(end);
    const int64_t bytes = OffsetOf(rows[end - 1].place) - first + slot_bytes_;
    posix_fadvise(fd_, first, bytes, POSIX_FADV_WILLNEED);
  }
  return ends;
}

void ColdFile::Announce(std::vector<Row> rows) const { Begin(&rows); }

Status ColdFile::Read(std::vector<Row> rows,
                      const std::function<void(const Row&, const char*)>& visit) const {
  std::vector<char> buffer;
  size_t begin = 0;
  for (const size_t end : Begin(&rows)) {
    const int64_t offset = OffsetOf(rows[begin].place);
    buffer.resize(OffsetOf(rows[end - 1].place) - offset + slot_bytes_);
    for (int64_t done = 0, bytes = buffer.size(); done < bytes;) {
      const ssize_t got = pread(fd_, &buffer[done], bytes - done, offset + done);
      if (got > 0) done += got;
      if (got > 0 || (got < 0 && errno == EINTR)) continue;
      return Status::DataLoss("cold_dir: " + dir_ + ": cannot read the row of key " +
                              std::to_string(rows[begin].key) + ": " +
                              (got == 0 ? "the file was cut" : std::strerror(errno)));
    }
    for (; begin < end; ++begin) {
      const char* const row = &buffer[OffsetOf(rows[begin].place) - offset];
      uint32_t sum;
      std::memcpy(&sum, row + row_bytes_, sizeof(sum));
      if (sum != Checksum(rows[begin].key, row, row_bytes_)) {
        return Status::DataLoss("cold_dir: " + dir_ + ": the row of key " +
                                std::to_string(rows[begin].key) +
                                " is damaged: found another checksum than was written");
      }
      visit(rows[begin], row);
    }
  }
  return Status();
}

void ColdFile::Release(int32_t place) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int32_t chunk = ChunkOf(place);
  --size_;
  if (--rows_[chunk] == 0) free_.push_back(chunk);
}

std::vector<bool> ColdFile::SparseChunks() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<bool> sparse;
  for (const int32_t rows : rows_) sparse.push_back(rows * 2 <= rows_per_chunk());
  return sparse;
}

int64_t ColdFile::size() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return size_;
}

}  // namespace ctr
