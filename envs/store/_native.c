/* The two calls of a scan that are made for every directory and file: reading a directory with the stats of all
 * that is in it, compared with what was there before, and opening a path without following a link.
 * listing.py holds the same in Python and says what the records mean. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_openat2
#define SYS_openat2 437
#endif

enum {
    RESOLVE_SAFELY = 0x02 | 0x04 | 0x08, /* NO_MAGICLINKS, NO_SYMLINKS, BENEATH */
    SEGMENT_BYTES = 4000,                /* less than PATH_MAX; longer paths are walked in pieces */
    DIRENT_BYTES = 64 * 1024,
    MAX_THREADS = 8,
};

struct how {
    uint64_t flags, mode, resolve;
};

struct __attribute__((packed)) header {
    uint64_t dev, ino, count, allocated;
};

struct __attribute__((packed)) record {
    uint64_t ino, dev, size, blocks;
    int64_t mtime_s, ctime_s;
    uint32_t mtime_n, ctime_n, mode, nlink;
    uint16_t name_length;
    uint8_t unsettled;
};

struct dirent64 {
    uint64_t ino;
    int64_t offset;
    uint16_t length;
    uint8_t type;
    char name[];
};

/* ---- opening -------------------------------------------------------------------------------------------- */

/* Set once where the kernel or a filter has no openat2: links are then kept out component by component. */
static atomic_int no_openat2;

static int open_once(int root, const char *path, int flags, mode_t mode) {
    if (!atomic_load(&no_openat2)) {
        struct how how = {(uint64_t)(flags | O_NOFOLLOW | O_CLOEXEC), mode, RESOLVE_SAFELY};
        int fd, tries = 0;
        do
            fd = (int)syscall(SYS_openat2, root, path, &how, sizeof how);
        while (fd < 0 && (errno == EAGAIN || errno == EINTR) && tries++ < 100);
        if (fd >= 0 || (errno != ENOSYS && errno != EPERM)) return fd;
        /* Either this path is forbidden, or the whole call is. */
        int reason = errno;
        struct how probe = {O_PATH | O_CLOEXEC, 0, RESOLVE_SAFELY};
        int works = (int)syscall(SYS_openat2, root, ".", &probe, sizeof probe);
        if (works >= 0) {
            close(works);
            errno = reason;
            return -1;
        }
        atomic_store(&no_openat2, 1);
    }
    char piece[SEGMENT_BYTES + 1];
    int at = root;
    for (;;) {
        const char *slash = strchr(path, '/');
        size_t length = slash ? (size_t)(slash - path) : strlen(path);
        memcpy(piece, path, length);
        piece[length] = 0;
        int fd = openat(at, piece, (slash ? O_PATH | O_DIRECTORY : flags) | O_NOFOLLOW | O_CLOEXEC, mode);
        if (at != root) {
            int reason = errno;
            close(at);
            errno = reason;
        }
        if (fd < 0 || !slash) return fd;
        at = fd;
        path = slash + 1;
    }
}

/* Whether the path has a component that is empty or "..". */
static int leaves(const char *path, size_t length) {
    size_t start = 0;
    for (size_t at = 0; at <= length; at++) {
        if (at < length && path[at] != '/') continue;
        if (at == start || (at == start + 2 && path[start] == '.' && path[start + 1] == '.')) return 1;
        start = at + 1;
    }
    return 0;
}

/* The directory itself once more: by /proc, since looking up "." needs the right to search in it. */
static int again(int root, int flags) {
    char name[32];
    snprintf(name, sizeof name, "/proc/self/fd/%d", root);
    return open(name, flags | O_CLOEXEC);
}

/* Opens `path` below `root`, following no link anywhere; paths longer than PATH_MAX are walked in pieces. */
static int beneath(int root, const char *path, size_t length, int flags, mode_t mode) {
    char piece[SEGMENT_BYTES + 1];
    int at = root;
    if (length == 0) return again(root, flags & ~O_NOFOLLOW);
    if (leaves(path, length)) {
        errno = EXDEV;
        return -1;
    }
    while (length > SEGMENT_BYTES) {
        size_t cut = SEGMENT_BYTES;
        while (cut > 0 && path[cut] != '/') cut--;
        if (cut == 0) {
            errno = ENAMETOOLONG;
            break;
        }
        memcpy(piece, path, cut);
        piece[cut] = 0;
        int fd = open_once(at, piece, O_PATH | O_DIRECTORY, 0);
        int reason = errno;
        if (at != root) close(at);
        errno = reason;
        if (fd < 0) return -1;
        at = fd;
        path += cut + 1;
        length -= cut + 1;
    }
    int fd = -1;
    if (length <= SEGMENT_BYTES) {
        memcpy(piece, path, length);
        piece[length] = 0;
        fd = open_once(at, piece, flags, mode);
    }
    int reason = errno;
    if (at != root) close(at);
    errno = reason;
    return fd;
}

static PyObject *open_beneath(PyObject *module, PyObject *arguments) {
    (void)module;
    int root, flags, fd;
    unsigned int mode = 0;
    PyObject *path;
    char *text;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(arguments, "iSi|I", &root, &path, &flags, &mode)) return NULL;
    if (PyBytes_AsStringAndSize(path, &text, &length) < 0) return NULL;
    if (memchr(text, 0, (size_t)length)) {
        PyErr_SetString(PyExc_ValueError, "embedded null byte");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    fd = beneath(root, text, (size_t)length, flags, (mode_t)mode);
    Py_END_ALLOW_THREADS
    if (fd < 0) return PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path);
    return PyLong_FromLong(fd);
}

/* ---- comparing ------------------------------------------------------------------------------------------ */

struct bytes {
    char *start;
    size_t used, room;
};

struct offsets {
    size_t *start;
    size_t used, room;
};

struct job {
    const char *path, *previous, *names;
    size_t path_length, previous_length, names_length;
    int error, same;
    char *listing;
    size_t listing_length;
    struct offsets changed, gone;
    uint64_t count, allocated;
};

struct work {
    int root;
    int64_t settled_s;
    uint32_t settled_n;
    const uint64_t *distrusted;
    size_t distrusted_count, jobs_count;
    struct job *jobs;
    atomic_size_t next;
    atomic_llong remaining;
};

static int reserve(struct bytes *buffer, size_t more) {
    if (buffer->used + more <= buffer->room) return 0;
    size_t room = (buffer->room ? buffer->room : 4096);
    while (room < buffer->used + more) room *= 2;
    char *start = realloc(buffer->start, room);
    if (!start) return -1;
    buffer->start = start;
    buffer->room = room;
    return 0;
}

static int push(struct offsets *list, size_t value) {
    if (list->used == list->room) {
        size_t room = list->room ? 2 * list->room : 16;
        size_t *start = realloc(list->start, room * sizeof *start);
        if (!start) return -1;
        list->start = start;
        list->room = room;
    }
    list->start[list->used++] = value;
    return 0;
}

static int by_name(const void *left, const void *right, void *arena) {
    return strcmp((char *)arena + *(const size_t *)left, (char *)arena + *(const size_t *)right);
}

/* All names of the open directory into `arena`, each ended by a NUL, their offsets into `names`, in order. */
static int read_names(int fd, struct work *work, char *dirents, struct bytes *arena, struct offsets *names) {
    arena->used = names->used = 0;
    for (;;) {
        long got = syscall(SYS_getdents64, fd, dirents, DIRENT_BYTES);
        if (got < 0) return errno;
        if (got == 0) break;
        for (long at = 0; at < got;) {
            struct dirent64 *node = (struct dirent64 *)(dirents + at);
            at += node->length;
            if (!strcmp(node->name, ".") || !strcmp(node->name, "..")) continue;
            if (atomic_fetch_sub(&work->remaining, 1) <= 0) return E2BIG;
            size_t length = strlen(node->name) + 1;
            if (reserve(arena, length) || push(names, arena->used)) return ENOMEM;
            memcpy(arena->start + arena->used, node->name, length);
            arena->used += length;
        }
    }
    if (names->used) qsort_r(names->start, names->used, sizeof *names->start, by_name, arena->start);
    return 0;
}

/* The same for the names that the caller asks about, which are in order and each ended by a NUL. */
static int given_names(const struct job *job, struct bytes *arena, struct offsets *names) {
    arena->used = names->used = 0;
    if (job->names_length == 0) return 0;
    if (job->names[job->names_length - 1]) return EINVAL;
    if (reserve(arena, job->names_length)) return ENOMEM;
    memcpy(arena->start, job->names, job->names_length);
    arena->used = job->names_length;
    const char *before = NULL;
    for (size_t at = 0; at < arena->used; at += strlen(arena->start + at) + 1) {
        const char *name = arena->start + at;
        if (before && strcmp(before, name) >= 0) return EINVAL;
        if (strlen(name) > UINT16_MAX) return ENAMETOOLONG;
        if (push(names, at)) return ENOMEM;
        before = name;
    }
    return 0;
}

static int distrusts(const struct work *work, uint64_t dev, uint64_t ino) {
    for (size_t i = 0; i < work->distrusted_count; i++)
        if (work->distrusted[2 * i] == dev && work->distrusted[2 * i + 1] == ino) return 1;
    return 0;
}

static int settled(const struct work *work, int64_t seconds, uint32_t nanoseconds) {
    return seconds < work->settled_s || (seconds == work->settled_s && nanoseconds < work->settled_n);
}

static void describe(const struct work *work, const struct stat *info, size_t name_length, struct record *to) {
    to->ino = info->st_ino;
    to->dev = info->st_dev;
    to->size = (uint64_t)info->st_size;
    to->blocks = (uint64_t)info->st_blocks;
    to->mtime_s = info->st_mtim.tv_sec;
    to->mtime_n = (uint32_t)info->st_mtim.tv_nsec;
    to->ctime_s = info->st_ctim.tv_sec;
    to->ctime_n = (uint32_t)info->st_ctim.tv_nsec;
    to->mode = info->st_mode;
    to->nlink = (uint32_t)info->st_nlink;
    to->name_length = (uint16_t)name_length;
    to->unsettled = !settled(work, to->mtime_s, to->mtime_n) || !settled(work, to->ctime_s, to->ctime_n) ||
                    distrusts(work, to->dev, to->ino);
}

static int order(const struct record *left, const char *left_name, const struct record *right) {
    const char *right_name = (const char *)(right + 1);
    size_t shorter = left->name_length < right->name_length ? left->name_length : right->name_length;
    int by_bytes = memcmp(left_name, right_name, shorter);
    return by_bytes ? by_bytes : (int)left->name_length - (int)right->name_length;
}

/* The record at `at` of the previous listing, NULL at its end or where it is cut off. */
static const struct record *previous_record(const struct job *job, size_t at) {
    if (at + sizeof(struct record) > job->previous_length) return NULL;
    const struct record *record = (const struct record *)(job->previous + at);
    return at + sizeof *record + record->name_length > job->previous_length ? NULL : record;
}

/* A listing as it grows. */
static int append(struct bytes *listing, struct header *header, const struct record *record, const char *name) {
    if (reserve(listing, sizeof *record + record->name_length)) return ENOMEM;
    memcpy(listing->start + listing->used, record, sizeof *record);
    memcpy(listing->start + listing->used + sizeof *record, name, record->name_length);
    listing->used += sizeof *record + record->name_length;
    header->count++;
    if (S_ISREG(record->mode))
        header->allocated += record->blocks * 512 < record->size ? record->blocks * 512 : record->size;
    return 0;
}

/* Steps over a record of the previous listing that the directory now lacks, or that nobody asks about. */
static int step_over(struct job *job, int partial, size_t *at, struct bytes *listing, struct header *header) {
    const struct record *old = previous_record(job, *at);
    int error = partial ? append(listing, header, old, (const char *)(old + 1)) : push(&job->gone, *at) ? ENOMEM : 0;
    *at += sizeof *old + old->name_length;
    return error;
}

static int compare_open(int fd, struct work *work, struct job *job, char *dirents, struct bytes *arena,
                        struct offsets *names, struct bytes *listing) {
    struct stat info;
    if (fstat(fd, &info) < 0) return errno;
    struct header header = {info.st_dev, info.st_ino, 0, 0}, before = {0, 0, 0, 0};
    if (job->previous_length >= sizeof before) memcpy(&before, job->previous, sizeof before);
    int same_directory = before.dev == header.dev && before.ino == header.ino;
    int partial = job->names && same_directory;
    int error = partial ? given_names(job, arena, names) : read_names(fd, work, dirents, arena, names);
    if (error) return error;
    listing->used = 0;
    if (reserve(listing, sizeof header)) return ENOMEM;
    listing->used = sizeof header;
    size_t at = sizeof header;
    const struct record *old;
    for (size_t i = 0; i < names->used; i++) {
        const char *name = arena->start + names->start[i];
        struct record record = {.name_length = (uint16_t)strlen(name)};
        int position = -1;
        while ((old = previous_record(job, at)) && (position = order(&record, name, old)) > 0)
            if ((error = step_over(job, partial, &at, listing, &header))) return error;
        int known = old && position == 0;
        if (fstatat(fd, name, &info, AT_SYMLINK_NOFOLLOW) < 0) {
            if (errno != ENOENT) return errno;
            /* Gone, if only since the directory was read. */
            if (known && (error = step_over(job, 0, &at, listing, &header))) return error;
            continue;
        }
        describe(work, &info, record.name_length, &record);
        int equal = known && same_directory && !old->unsettled && !record.unsettled &&
                    !memcmp(old, &record, sizeof record);
        if (known) at += sizeof *old + old->name_length;
        if (!equal && push(&job->changed, listing->used)) return ENOMEM;
        if ((error = append(listing, &header, &record, name))) return error;
    }
    while (previous_record(job, at))
        if ((error = step_over(job, partial, &at, listing, &header))) return error;
    memcpy(listing->start, &header, sizeof header);
    job->count = header.count;
    job->allocated = header.allocated;
    job->same = same_directory && !job->changed.used && !job->gone.used;
    if (!job->same) {
        job->listing = malloc(listing->used);
        if (!job->listing) return ENOMEM;
        memcpy(job->listing, listing->start, listing->used);
        job->listing_length = listing->used;
    }
    return 0;
}

static void *compare_jobs(void *argument) {
    struct work *work = argument;
    struct bytes arena = {0}, listing = {0};
    struct offsets names = {0};
    char *dirents = malloc(DIRENT_BYTES);
    for (;;) {
        size_t number = atomic_fetch_add(&work->next, 1);
        if (number >= work->jobs_count) break;
        struct job *job = &work->jobs[number];
        if (!dirents) {
            job->error = ENOMEM;
            continue;
        }
        int fd = beneath(work->root, job->path, job->path_length, O_RDONLY | O_DIRECTORY, 0);
        if (fd < 0) {
            job->error = errno;
            continue;
        }
        job->error = compare_open(fd, work, job, dirents, &arena, &names, &listing);
        close(fd);
    }
    free(dirents);
    free(arena.start);
    free(listing.start);
    free(names.start);
    return NULL;
}

static void compare_all(struct work *work, int threads) {
    pthread_t started[MAX_THREADS];
    int count = 0;
    while (count < threads - 1 && count < MAX_THREADS) {
        if (pthread_create(&started[count], NULL, compare_jobs, work)) break;
        count++;
    }
    compare_jobs(work);
    for (int i = 0; i < count; i++) pthread_join(started[i], NULL);
}

/* ---- from and to Python --------------------------------------------------------------------------------- */

static PyObject *nanoseconds(int64_t seconds, uint32_t rest) {
    if (seconds < 9000000000LL && seconds > -9000000000LL)
        return PyLong_FromLongLong(seconds * 1000000000LL + rest);
    PyObject *result = NULL, *whole = PyLong_FromLongLong(seconds), *unit = PyLong_FromLong(1000000000L);
    PyObject *part = PyLong_FromUnsignedLong(rest), *product = NULL;
    if (whole && unit && part) product = PyNumber_Multiply(whole, unit);
    if (product) result = PyNumber_Add(product, part);
    Py_XDECREF(whole);
    Py_XDECREF(unit);
    Py_XDECREF(part);
    Py_XDECREF(product);
    return result;
}

static PyObject *record_tuple(const char *at) {
    struct record record;
    memcpy(&record, at, sizeof record);
    PyObject *mtime = nanoseconds(record.mtime_s, record.mtime_n);
    PyObject *ctime = nanoseconds(record.ctime_s, record.ctime_n);
    if (!mtime || !ctime) {
        Py_XDECREF(mtime);
        Py_XDECREF(ctime);
        return NULL;
    }
    return Py_BuildValue("(y#IKIKKNNK)", at + sizeof record, (Py_ssize_t)record.name_length,
                         (unsigned int)record.mode, (unsigned long long)record.ino,
                         (unsigned int)record.nlink, (unsigned long long)record.size,
                         (unsigned long long)record.blocks, mtime, ctime, (unsigned long long)record.dev);
}

static PyObject *record_name(const char *at) {
    struct record record;
    memcpy(&record, at, sizeof record);
    return PyBytes_FromStringAndSize(at + sizeof record, record.name_length);
}

static PyObject *each(const struct offsets *offsets, const char *start, PyObject *(*make)(const char *)) {
    PyObject *list = PyList_New((Py_ssize_t)offsets->used);
    for (size_t i = 0; list && i < offsets->used; i++) {
        PyObject *item = make(start + offsets->start[i]);
        if (!item || PyList_SetItem(list, (Py_ssize_t)i, item) < 0) {
            Py_DECREF(list);
            return NULL;
        }
    }
    return list;
}

static PyObject *job_result(const struct job *job) {
    if (job->error) return PyLong_FromLong(job->error);
    PyObject *listing = NULL, *changed = NULL, *gone = NULL;
    if (job->same)
        listing = Py_NewRef(Py_None);
    else
        listing = PyBytes_FromStringAndSize(job->listing, (Py_ssize_t)job->listing_length);
    changed = each(&job->changed, job->listing, record_tuple);
    gone = each(&job->gone, job->previous, record_name);
    if (!listing || !changed || !gone) {
        Py_XDECREF(listing);
        Py_XDECREF(changed);
        Py_XDECREF(gone);
        return NULL;
    }
    return Py_BuildValue("(NNNKK)", listing, changed, gone, (unsigned long long)job->count,
                         (unsigned long long)job->allocated);
}

static int read_job(PyObject *item, struct job *job) {
    PyObject *path, *previous, *names;
    char *text;
    Py_ssize_t length;
    if (!PyTuple_Check(item)) {
        PyErr_SetString(PyExc_TypeError, "a directory is a tuple of its path, its previous listing and names");
        return -1;
    }
    if (!PyArg_ParseTuple(item, "SOO", &path, &previous, &names)) return -1;
    if (PyBytes_AsStringAndSize(path, &text, &length) < 0) return -1;
    job->path = text;
    job->path_length = (size_t)length;
    if (previous != Py_None) {
        if (PyBytes_AsStringAndSize(previous, &text, &length) < 0) return -1;
        job->previous = text;
        job->previous_length = (size_t)length;
    }
    if (names != Py_None) {
        if (PyBytes_AsStringAndSize(names, &text, &length) < 0) return -1;
        job->names = text;
        job->names_length = (size_t)length;
    }
    return 0;
}

static PyObject *compare(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *given, *directories, *result = NULL;
    struct work work = {0};
    long long settled_ns, max_entries;
    int threads;
    const char *distrusted;
    Py_ssize_t distrusted_length;
    if (!PyArg_ParseTuple(arguments, "iOLLy#i", &work.root, &given, &settled_ns, &max_entries, &distrusted,
                          &distrusted_length, &threads))
        return NULL;
    /* A tuple of its own keeps every path and listing alive while other threads run. */
    directories = PySequence_Tuple(given);
    if (!directories) return NULL;
    work.settled_s = settled_ns / 1000000000LL;
    work.settled_n = (uint32_t)(settled_ns % 1000000000LL);
    work.distrusted_count = (size_t)distrusted_length / (2 * sizeof(uint64_t));
    uint64_t *pairs = malloc(work.distrusted_count * 2 * sizeof(uint64_t) + 1);
    work.jobs_count = (size_t)PyTuple_Size(directories);
    work.jobs = calloc(work.jobs_count + 1, sizeof *work.jobs);
    if (!work.jobs || !pairs) {
        PyErr_NoMemory();
        goto done;
    }
    memcpy(pairs, distrusted, work.distrusted_count * 2 * sizeof(uint64_t));
    work.distrusted = pairs;
    atomic_init(&work.next, 0);
    atomic_init(&work.remaining, max_entries);
    for (size_t i = 0; i < work.jobs_count; i++)
        if (read_job(PyTuple_GetItem(directories, (Py_ssize_t)i), &work.jobs[i]) < 0) goto done;
    Py_BEGIN_ALLOW_THREADS
    compare_all(&work, threads);
    Py_END_ALLOW_THREADS
    result = PyList_New((Py_ssize_t)work.jobs_count);
    for (size_t i = 0; result && i < work.jobs_count; i++) {
        PyObject *one = job_result(&work.jobs[i]);
        if (!one || PyList_SetItem(result, (Py_ssize_t)i, one) < 0) {
            Py_CLEAR(result);
            break;
        }
    }
done:
    for (size_t i = 0; work.jobs && i < work.jobs_count; i++) {
        free(work.jobs[i].listing);
        free(work.jobs[i].changed.start);
        free(work.jobs[i].gone.start);
    }
    free(work.jobs);
    free(pairs);
    Py_DECREF(directories);
    return result;
}

static PyMethodDef functions[] = {
    {"compare", compare, METH_VARARGS, "Directories as they are now against their previous listings."},
    {"open_beneath", open_beneath, METH_VARARGS, "Opens a path below a directory, following no link."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "Reads directories; see listing.py.", -1, functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&definition); }
