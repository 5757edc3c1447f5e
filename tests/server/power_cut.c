/* Records each change that a process makes to the files of a folder, for test_power_loss.py.
 *
 * Preloaded (LD_PRELOAD). POWER_CUT_FOLDER names the folder, POWER_CUT_RECORD the record, which several processes may
 * share: each entry is one append of a line "kind number length path\n" and, after it, `length` bytes.
 * A write is recorded before it happens. A sync is recorded before it begins and after it has succeeded, so that
 * the reader counts a write as synced only if it was recorded before the sync began.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define FILES 4096
static char *paths[FILES]; /* the path of each open file of the folder, by its descriptor */
static int record = -1;
static int syncs; /* so far, by which the begin and the end of each are matched */

#define REAL(name) ((__typeof__(&name))real(#name))
static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

static const char *path_of(int fd) { return fd >= 0 && fd < FILES ? paths[fd] : NULL; }

static int is_ours(const char *path) {
    const char *folder = getenv("POWER_CUT_FOLDER");
    return folder && path && !strncmp(path, folder, strlen(folder)) && !strstr(path, "-shm");
}

static void note(char kind, const char *path, long long number, const void *data, size_t length) {
    char head[4400];
    if (record < 0) {
        record = REAL(open)(getenv("POWER_CUT_RECORD"), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    }
    int size = snprintf(head, sizeof head, "%c %lld %zu %s\n", kind, number, length, path);
    struct iovec parts[] = {{head, size}, {(void *)data, length}};
    if (writev(record, parts, 2) != (ssize_t)(size + length)) abort();
}

static int opened(int fd, const char *path, int flags, int was_there) {
    if (fd < 0 || fd >= FILES) return fd;
    free(paths[fd]);
    paths[fd] = is_ours(path) ? strdup(path) : NULL;
    if (paths[fd] && !was_there) note('C', path, 0, NULL, 0);
    if (paths[fd] && flags & O_TRUNC) note('T', path, 0, NULL, 0);
    return fd;
}

#define OPEN(name)                                                                      \
    int name(const char *path, int flags, ...) {                                        \
        va_list rest;                                                                   \
        va_start(rest, flags);                                                          \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;         \
        va_end(rest);                                                                   \
        int was_there = !is_ours(path) || access(path, F_OK) == 0;                      \
        return opened(REAL(name)(path, flags, mode), path, flags, was_there);           \
    }
OPEN(open)
OPEN(open64)

int close(int fd) {
    if (path_of(fd)) {
        free(paths[fd]);
        paths[fd] = NULL;
    }
    return REAL(close)(fd);
}

ssize_t write(int fd, const void *data, size_t length) {
    if (path_of(fd)) note('W', path_of(fd), lseek(fd, 0, fcntl(fd, F_GETFL) & O_APPEND ? SEEK_END : SEEK_CUR), data, length);
    return REAL(write)(fd, data, length);
}

#define PWRITE(name, offset_t)                                                 \
    ssize_t name(int fd, const void *data, size_t length, offset_t offset) {   \
        if (path_of(fd)) note('W', path_of(fd), offset, data, length);         \
        return REAL(name)(fd, data, length, offset);                           \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

#define TRUNCATE(name, offset_t)                                               \
    int name(int fd, offset_t size) {                                          \
        if (path_of(fd)) note('T', path_of(fd), size, NULL, 0);                \
        return REAL(name)(fd, size);                                           \
    }
TRUNCATE(ftruncate, off_t)
TRUNCATE(ftruncate64, off64_t)

#define SYNC(name)                                                                  \
    int name(int fd) {                                                              \
        long long number = getpid() * 1000000LL + __sync_fetch_and_add(&syncs, 1);  \
        if (path_of(fd)) note('B', path_of(fd), number, NULL, 0);                   \
        int status = REAL(name)(fd);                                                \
        if (path_of(fd) && status == 0) note('E', path_of(fd), number, NULL, 0);    \
        return status;                                                              \
    }
SYNC(fsync)
SYNC(fdatasync)

int unlink(const char *path) {
    if (is_ours(path)) note('U', path, 0, NULL, 0);
    return REAL(unlink)(path);
}

int rename(const char *from, const char *to) {
    if (is_ours(from)) note('R', from, 0, to, strlen(to));
    return REAL(rename)(from, to);
}
