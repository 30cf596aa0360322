// Ends the process with a message if a mapped file is cut short while this process reads it.
#include <fcntl.h>
#include <unistd.h>

#include <climits>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>

namespace {

struct sigaction before;  // the handler that ours has replaced

// Returns the path in a line of /proc/self/maps ("begin-end perms offset device inode path"); null
// if the line does not cover the address, or has no file.
const char* PathOf(const char* line, uintptr_t address) {
  char* rest;
  const uintptr_t begin = std::strtoull(line, &rest, 16);
  const uintptr_t end = *rest == '-' ? std::strtoull(rest + 1, &rest, 16) : 0;
  return begin <= address && address < end ? std::strchr(rest, '/') : nullptr;
}

void Write(const char* text) {
  if (write(STDERR_FILENO, text, std::strlen(text)) < 0) return;  // there is nobody else to tell
}

// The handler of SIGBUS. It calls only functions that a signal handler may call.
void OnBusError(int, siginfo_t* info, void*) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(info->si_addr);
  const int maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  char line[PATH_MAX + 128], letter;
  size_t length = 0;
  while (info->si_code == BUS_ADRERR && read(maps, &letter, 1) == 1) {
    if (letter != '\n') {
      if (length + 1 < sizeof(line)) line[length++] = letter;
      continue;
    }
    line[length] = '\0';
    length = 0;
    if (const char* const path = PathOf(line, address)) {
      Write("error: ");
      Write(path);
      Write(": was cut short while it was read; if it is a prepared pass, prepare it again\n");
      _exit(2);
    }
  }
  sigaction(SIGBUS, &before, nullptr);  // the read is repeated, and ends as it would have
}

}  // namespace

// From now on, when the process reads a page of a mapped file that is no longer there, it ends with
// one line on stderr and status 2 instead of a bus error. This replaces the handler of SIGBUS; call
// it again if another may have been set since. A SIGBUS of any other cause goes to the handler
// before.
extern "C" void ctr_tell_files_cut_short() {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  struct sigaction now;
  sigaction(SIGBUS, nullptr, &now);
  if (now.sa_sigaction == OnBusError) return;
  before = now;
  struct sigaction ours = {};
  ours.sa_sigaction = OnBusError;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGBUS, &ours, nullptr);
}
