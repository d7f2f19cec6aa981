/* Between a process and its disk: fail one system call below a folder, or log all of them so that they can be replayed.
 *
 * Preloaded (LD_PRELOAD), it does nothing until shim_arm() names a folder. A call that concerns no path below it is
 * passed on. disk.py compiles it and reads its log.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char folder[PATH_MAX];
static size_t folder_length; /* 0: not armed */
static int trace = -1;
static long count, fail_at;
static int fail_with, fails_on, is_torn;

#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name) {
    return dlsym(RTLD_NEXT, name);
}

/* Begin to log to `log`, unless it is empty. Call number `at` (from 1; 0: none) fails with `error`; with `on`, all later
 * calls fail too. With `torn`, the first write from there on writes half of its bytes, and the call after it fails. */
void shim_arm(const char *below, const char *log, long at, int error, int on, int torn) {
    if (*log)
        trace = REAL(open)(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    count = 0, fail_at = at, fail_with = error, fails_on = on, is_torn = torn;
    strcpy(folder, below);
    folder_length = strlen(folder);
}

void shim_disarm(void) {
    folder_length = 0;
    if (trace >= 0)
        close(trace);
    trace = -1;
}

static int is_below(const char *path) {
    return strncmp(path, folder, folder_length) == 0 && (path[folder_length] == '/' || path[folder_length] == 0);
}

static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
    return length > 0;
}

/* Tell whether a path is below the folder, and write it absolute. */
static int concerns(int dir, const char *name, char *path) {
    if (folder_length == 0 || name == NULL)
        return 0;
    if (*name == '/') {
        snprintf(path, PATH_MAX, "%s", name);
    } else {
        char base[PATH_MAX];
        if (dir == AT_FDCWD ? getcwd(base, sizeof base) == NULL : !path_of(dir, base))
            return 0;
        snprintf(path, PATH_MAX, "%.2000s/%.2000s", base, name);
    }
    return is_below(path);
}

static int concerns_fd(int fd, char *path) {
    return folder_length != 0 && path_of(fd, path) && is_below(path);
}

/* Count a call; return the error that it is to fail with, or 0. */
static int next_error(void) {
    count++;
    return fail_at && !is_torn && (count == fail_at || (fails_on && count > fail_at)) ? fail_with : 0;
}

static void put(const void *bytes, size_t size) {
    if (size && REAL(write)(trace, bytes, size) != (ssize_t)size)
        dprintf(2, "disk shim: its log cannot be written\n");
}

static void note(const char *kind, int error, const char *path, const char *other, long at, const void *data,
                 size_t size) {
    if (trace < 0)
        return;
    char head[128];
    int length = snprintf(head, sizeof head, "%ld %s %d %ld %zu %zu %zu\n", count, kind, error, at, strlen(path),
                          strlen(other), size);
    put(head, length);
    put(path, strlen(path));
    put(other, strlen(other));
    put(data, size);
}

/* Make one call under the lock: let it fail if it is its turn, and log it. `call` sets `result`. */
#define MAKE(kind, path, other, call)                     \
    do {                                                  \
        pthread_mutex_lock(&lock);                        \
        int error = next_error();                         \
        if (error)                                        \
            result = -1, errno = error;                   \
        else {                                            \
            call;                                         \
            error = result < 0 ? errno : 0;               \
        }                                                 \
        note(kind, error, path, other, 0, NULL, 0);       \
        pthread_mutex_unlock(&lock);                      \
        errno = error ? error : errno;                    \
    } while (0)

static int open_at(int dir, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    if (!concerns(dir, name, path))
        return REAL(openat)(dir, name, flags, mode);
    struct stat found;
    int result, is_new = (flags & O_CREAT) && fstatat(dir, name, &found, 0) != 0;
    const char *kind = is_new                                ? "create"
                       : (flags & O_TRUNC)                   ? "empty"
                       : (flags & O_ACCMODE) == O_RDONLY     ? "open_to_read"
                                                             : "open_to_write";
    MAKE(kind, path, "", result = REAL(openat)(dir, name, flags, mode));
    return result;
}

static mode_t mode_of(int flags, va_list rest) {
    return flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
}

#define OPEN(name)                                  \
    int name(const char *path, int flags, ...) {    \
        va_list rest;                               \
        va_start(rest, flags);                      \
        mode_t mode = mode_of(flags, rest);         \
        va_end(rest);                               \
        return open_at(AT_FDCWD, path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                      \
    int name(int dir, const char *path, int flags, ...) { \
        va_list rest;                                     \
        va_start(rest, flags);                            \
        mode_t mode = mode_of(flags, rest);               \
        va_end(rest);                                     \
        return open_at(dir, path, flags, mode);           \
    }
OPENAT(openat)
OPENAT(openat64)

/* `at` is where a pwrite writes, -1 for a write, which writes where the file stands. */
static ssize_t write_at(int fd, const void *data, size_t size, off_t at) {
    char path[PATH_MAX];
    if (!concerns_fd(fd, path))
        return at < 0 ? REAL(write)(fd, data, size) : REAL(pwrite)(fd, data, size, at);
    pthread_mutex_lock(&lock);
    int error = next_error();
    ssize_t result = -1;
    if (is_torn && count >= fail_at) {
        is_torn = 0, size /= 2, fail_at = count + 1; /* the caller goes on with the other half, and that fails */
        error = size ? 0 : fail_with;
    }
    if (!error) {
        result = at < 0 ? REAL(write)(fd, data, size) : REAL(pwrite)(fd, data, size, at);
        error = result < 0 ? errno : 0;
    }
    if (!error && at < 0)
        at = lseek(fd, 0, SEEK_CUR) - result;
    note("write", error, path, "", at, data, result < 0 ? 0 : result);
    pthread_mutex_unlock(&lock);
    errno = error ? error : errno;
    return result;
}

ssize_t write(int fd, const void *data, size_t size) {
    return write_at(fd, data, size, -1);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    return write_at(fd, data, size, at);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off_t at) {
    return write_at(fd, data, size, at);
}

ssize_t writev(int fd, const struct iovec *parts, int parts_count) {
    char path[PATH_MAX];
    if (!concerns_fd(fd, path))
        return REAL(writev)(fd, parts, parts_count);
    return parts_count ? write_at(fd, parts[0].iov_base, parts[0].iov_len, -1) : 0; /* a short write is allowed */
}

#define OF_FD(name)                                        \
    int name(int fd) {                                     \
        char path[PATH_MAX];                               \
        if (!concerns_fd(fd, path))                        \
            return REAL(name)(fd);                         \
        int result;                                        \
        MAKE("fsync", path, "", result = REAL(name)(fd)); \
        return result;                                     \
    }
OF_FD(fsync)
OF_FD(fdatasync)

static int truncate_fd(int fd, off_t size) {
    char path[PATH_MAX];
    if (!concerns_fd(fd, path))
        return REAL(ftruncate)(fd, size);
    pthread_mutex_lock(&lock);
    int error = next_error(), result = -1;
    if (!error) {
        result = REAL(ftruncate)(fd, size);
        error = result < 0 ? errno : 0;
    }
    note("truncate", error, path, "", size, NULL, 0);
    pthread_mutex_unlock(&lock);
    errno = error ? error : errno;
    return result;
}

int ftruncate(int fd, off_t size) {
    return truncate_fd(fd, size);
}

int ftruncate64(int fd, off_t size) {
    return truncate_fd(fd, size);
}

int renameat(int old_dir, const char *old, int new_dir, const char *new) {
    char from[PATH_MAX], to[PATH_MAX];
    int is_from = concerns(old_dir, old, from), is_to = concerns(new_dir, new, to), result;
    if (!is_from && !is_to)
        return REAL(renameat)(old_dir, old, new_dir, new);
    MAKE("rename", from, to, result = REAL(renameat)(old_dir, old, new_dir, new));
    return result;
}

int rename(const char *old, const char *new) {
    return renameat(AT_FDCWD, old, AT_FDCWD, new);
}

int mkdirat(int dir, const char *name, mode_t mode) {
    char path[PATH_MAX];
    if (!concerns(dir, name, path))
        return REAL(mkdirat)(dir, name, mode);
    int result;
    MAKE("mkdir", path, "", result = REAL(mkdirat)(dir, name, mode));
    return result;
}

int mkdir(const char *name, mode_t mode) {
    return mkdirat(AT_FDCWD, name, mode);
}

int unlinkat(int dir, const char *name, int flags) {
    char path[PATH_MAX];
    if (!concerns(dir, name, path))
        return REAL(unlinkat)(dir, name, flags);
    int result;
    MAKE(flags & AT_REMOVEDIR ? "rmdir" : "unlink", path, "", result = REAL(unlinkat)(dir, name, flags));
    return result;
}

int unlink(const char *name) {
    return unlinkat(AT_FDCWD, name, 0);
}

int rmdir(const char *name) {
    return unlinkat(AT_FDCWD, name, AT_REMOVEDIR);
}

/* What our program does not use: logged, so that a replay says that it does not know it. */

int linkat(int old_dir, const char *old, int new_dir, const char *new, int flags) {
    char from[PATH_MAX], to[PATH_MAX];
    concerns(old_dir, old, from);
    if (!concerns(new_dir, new, to))
        return REAL(linkat)(old_dir, old, new_dir, new, flags);
    int result;
    MAKE("link", from, to, result = REAL(linkat)(old_dir, old, new_dir, new, flags));
    return result;
}

int link(const char *old, const char *new) {
    return linkat(AT_FDCWD, old, AT_FDCWD, new, 0);
}

int symlinkat(const char *target, int dir, const char *name) {
    char path[PATH_MAX];
    if (!concerns(dir, name, path))
        return REAL(symlinkat)(target, dir, name);
    int result;
    MAKE("symlink", path, "", result = REAL(symlinkat)(target, dir, name));
    return result;
}

int symlink(const char *target, const char *name) {
    return symlinkat(target, AT_FDCWD, name);
}

#define COPY(name, offset)                                                                  \
    ssize_t name(int out, int in, offset *at, size_t size) {                                \
        char path[PATH_MAX];                                                                \
        if (!concerns_fd(out, path))                                                        \
            return ((ssize_t(*)(int, int, offset *, size_t))real(#name))(out, in, at, size); \
        ssize_t result;                                                                     \
        MAKE("copy", path, "",                                                              \
             result = ((ssize_t(*)(int, int, offset *, size_t))real(#name))(out, in, at, size)); \
        return result;                                                                      \
    }
COPY(sendfile, off_t)
COPY(sendfile64, off64_t)

ssize_t copy_file_range(int in, off64_t *in_at, int out, off64_t *out_at, size_t size, unsigned flags) {
    char path[PATH_MAX];
    if (!concerns_fd(out, path))
        return REAL(copy_file_range)(in, in_at, out, out_at, size, flags);
    ssize_t result;
    MAKE("copy", path, "", result = REAL(copy_file_range)(in, in_at, out, out_at, size, flags));
    return result;
}

#define MMAP(name, offset)                                                                              \
    void *name(void *address, size_t length, int access, int flags, int fd, offset at) {                \
        char path[PATH_MAX];                                                                            \
        if ((access & PROT_WRITE) && (flags & MAP_SHARED) && fd >= 0 && concerns_fd(fd, path)) {        \
            pthread_mutex_lock(&lock);                                                                  \
            next_error();                                                                               \
            note("mmap", 0, path, "", at, NULL, 0);                                                     \
            pthread_mutex_unlock(&lock);                                                                \
        }                                                                                               \
        return ((void *(*)(void *, size_t, int, int, int, offset))real(#name))(address, length, access, \
                                                                               flags, fd, at);          \
    }
MMAP(mmap, off_t)
MMAP(mmap64, off64_t)
