// Preloaded into a process: files under $WHOLE_FILES_ONLY can only be written from their first byte to their last, as on
// a volume of Databricks. Seeking while writing, appending, truncating and locks are refused.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#define FILES 65536
static char written[FILES];  // whether a descriptor writes to a file of the folder

static int refused(void) { errno = EOPNOTSUPP; return -1; }
static int is_written(int fd) { return fd >= 0 && fd < FILES && written[fd]; }

static int opened(int fd, int flags) {
    const char *folder = getenv("WHOLE_FILES_ONLY");
    char link[64], path[PATH_MAX];
    if (fd < 0 || fd >= FILES || !folder) return fd;
    written[fd] = 0;
    if ((flags & O_ACCMODE) == O_RDONLY) return fd;
    strcpy(link, "/proc/self/fd/");
    char digits[16]; int n = 0, rest = fd;
    do { digits[n++] = '0' + rest % 10; rest /= 10; } while (rest);
    for (int i = 0; i < n; i++) link[14 + i] = digits[n - 1 - i];
    link[14 + n] = 0;
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return fd;
    path[size] = 0;
    if (strncmp(path, folder, strlen(folder))) return fd;
    written[fd] = 1;
    if (flags & O_APPEND) { close(fd); return refused(); }
    return fd;
}

#define OPEN(NAME) \
    int NAME(const char *path, int flags, ...) { \
        static int (*next)(const char *, int, ...); \
        va_list list; va_start(list, flags); mode_t mode = va_arg(list, mode_t); va_end(list); \
        if (!next) next = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #NAME); \
        return opened(next(path, flags, mode), flags); }
#define OPENAT(NAME) \
    int NAME(int at, const char *path, int flags, ...) { \
        static int (*next)(int, const char *, int, ...); \
        va_list list; va_start(list, flags); mode_t mode = va_arg(list, mode_t); va_end(list); \
        if (!next) next = (int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, #NAME); \
        return opened(next(at, path, flags, mode), flags); }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)

#define SEEK(NAME) \
    off_t NAME(int fd, off_t offset, int whence) { \
        static off_t (*next)(int, off_t, int); \
        if (!next) next = (off_t (*)(int, off_t, int))dlsym(RTLD_NEXT, #NAME); \
        off_t before = is_written(fd) ? next(fd, 0, SEEK_CUR) : 0, after = next(fd, offset, whence); \
        if (!is_written(fd) || after == before) return after; \
        next(fd, before, SEEK_SET); \
        return refused(); }
SEEK(lseek) SEEK(lseek64)

#define REFUSE(TYPE, NAME, ARGUMENTS, CALL) \
    TYPE NAME ARGUMENTS { \
        static TYPE (*next) ARGUMENTS; \
        if (!next) next = (TYPE (*) ARGUMENTS)dlsym(RTLD_NEXT, #NAME); \
        return is_written(fd) ? (TYPE)refused() : next CALL; }
REFUSE(ssize_t, pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
REFUSE(ssize_t, pwrite64, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
REFUSE(int, ftruncate, (int fd, off_t size), (fd, size))
REFUSE(int, ftruncate64, (int fd, off_t size), (fd, size))
REFUSE(int, flock, (int fd, int operation), (fd, operation))

int close(int fd) {
    static int (*next)(int);
    if (!next) next = (int (*)(int))dlsym(RTLD_NEXT, "close");
    if (fd >= 0 && fd < FILES) written[fd] = 0;
    return next(fd);
}
