/* The system calls behind overlay workspaces, which Python has no names for.
 *
 * Entering a user namespace is allowed to a process of one thread only, and the caller has many. Each operation
 * therefore runs in a child that shares our memory and descriptors, as after vfork(2): it costs some 50 us, however
 * large the caller is, and descriptors that it opens are ours as well. The child uses its own stack, calls nothing
 * but the kernel, and leaves only `struct result` behind.
 *
 * The child never enters a PID namespace, so nothing in a sandbox can see or trace it while it is there.
 */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define STACK_BYTES (32 * 1024)
#define OPTIONS_BYTES 4096
#define MESSAGE_BYTES 512
#define NAME_BYTES 512

/* Not <sys/mount.h>: before glibc 2.36 it cannot stand beside the kernel's header. */
#define DETACH_NOFOLLOW (2 | 8) /* MNT_DETACH | UMOUNT_NOFOLLOW */
#ifndef SYS_mount_setattr       /* Linux 5.12 */
#define SYS_mount_setattr 442
#endif

struct result {
    int error, fd;    /* errno, 0 for success */
    const char *step; /* what failed, */
    char message[MESSAGE_BYTES]; /* and what the kernel said about it */
};

/* ---- a child that shares our memory -------------------------------------------------------------------------- */

/* Changing its credentials makes the memory that the child shares with us undumpable, which hides us from debuggers
 * and profilers. The last operation to end puts back what the first one found. */
static pthread_mutex_t dumpable_lock = PTHREAD_MUTEX_INITIALIZER;
static int sharing, dumpable_before;

static void share_memory(int children) {
    pthread_mutex_lock(&dumpable_lock);
    if (sharing == 0)
        dumpable_before = prctl(PR_GET_DUMPABLE, 0, 0, 0, 0);
    sharing += children;
    if (sharing == 0 && dumpable_before == 1)
        prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
    pthread_mutex_unlock(&dumpable_lock);
}

static int in_child(int (*work)(void *), void *argument) {
    char stack[STACK_BYTES] __attribute__((aligned(16)));
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* For the child too: its handlers would be ours. */
    share_memory(1);
    /* Without an exit signal, so that nobody else who waits for children meets it. */
    pid_t child = clone(work, stack + STACK_BYTES, CLONE_VM | CLONE_VFORK | CLONE_FILES, argument);
    int error = child < 0 ? errno : 0;
    if (child > 0)
        waitpid(child, NULL, __WALL);
    share_memory(-1);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

static int failed(struct result *result, const char *step) {
    result->error = errno;
    result->step = step;
    return 1;
}

static int enter(int user_ns, int mount_ns, struct result *result) {
    if (setns(user_ns, CLONE_NEWUSER) < 0)
        return failed(result, "setns(user)");
    if (setns(mount_ns, CLONE_NEWNS) < 0)
        return failed(result, "setns(mnt)");
    return 0;
}

/* Runs `work` in the child and waits for its end. Returns whether it succeeded; sets an exception if not. */
static int ran(int (*work)(void *), void *argument, struct result *result) {
    char text[MESSAGE_BYTES + 128];
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = in_child(work, argument);
    Py_END_ALLOW_THREADS
    if (error)
        *result = (struct result){.error = error, .step = "clone"};
    if (!result->error)
        return 1;
    int length = (int)strcspn(result->message, "\n");
    snprintf(text, sizeof text, "%s: %s%s%.*s", result->step, strerror(result->error), length ? ": " : "", length,
             result->message);
    PyObject *arguments = Py_BuildValue("(is)", result->error, text);
    PyErr_SetObject(PyExc_OSError, arguments);
    Py_XDECREF(arguments);
    return 0;
}

/* ---- mount --------------------------------------------------------------------------------------------------- */

struct mounting {
    int user_ns, mount_ns, classic;
    const char *directory, *lowers, *upper, *work, *part, *staging;
    struct result result;
};

/* userxattr: what a user namespace may write. volatile: no unmount and no fsync waits for the disk, whose copy of a
 * workspace nobody would use after a crash. The rest are features that leave marks in a layer which only the mount
 * that made it understands: an index of hard links, files without their content, directories under another name. */
static const char *const OPTIONS[][2] = {
    {"userxattr", NULL}, {"volatile", NULL},          {"index", "off"},
    {"xino", "off"},     {"redirect_dir", "nofollow"}, {"metacopy", "off"},
};
#define OPTION_COUNT (int)(sizeof OPTIONS / sizeof OPTIONS[0])

static int set(int context, const char *key, const char *value) {
    unsigned command = value ? FSCONFIG_SET_STRING : FSCONFIG_SET_FLAG;
    return (int)syscall(SYS_fsconfig, context, command, key, value, 0);
}

/* Returns what failed, NULL for success. */
static const char *configure(int context, const struct mounting *m) {
    char name[NAME_BYTES];
    for (int i = 0; i < OPTION_COUNT; i++)
        if (set(context, OPTIONS[i][0], OPTIONS[i][1]) < 0)
            return OPTIONS[i][0];
    for (const char *rest = m->lowers; *rest; rest += strspn(rest, ":")) {
        size_t length = strcspn(rest, ":");
        snprintf(name, sizeof name, "%.*s", (int)length, rest);
        if (set(context, "lowerdir+", name) < 0)
            return "lowerdir+";
        rest += length;
    }
    if (set(context, "source", "overlay") < 0 || set(context, "upperdir", m->upper) < 0 ||
        set(context, "workdir", m->work) < 0)
        return "upperdir";
    if (syscall(SYS_fsconfig, context, FSCONFIG_CMD_CREATE, NULL, NULL, 0) < 0)
        return "fsconfig(create)";
    return NULL;
}

static int part_of(int fd, const char *path, struct result *result) {
    int part = (int)syscall(SYS_open_tree, fd, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    return part < 0 ? failed(result, "open_tree"), -1 : part;
}

/* Linux 6.15: lowerdir+ (6.8), and a part of a mount that is nowhere in the tree. */
static int detached_part(struct mounting *m) {
    int part = -1, context = (int)syscall(SYS_fsopen, "overlay", FSOPEN_CLOEXEC);
    if (context < 0)
        return failed(&m->result, "fsopen"), -1;
    const char *step = configure(context, m);
    if (step != NULL) {
        failed(&m->result, step);
        ssize_t length = read(context, m->result.message, MESSAGE_BYTES - 1);
        m->result.message[length > 0 ? length : 0] = 0;
    } else {
        int whole = (int)syscall(SYS_fsmount, context, FSMOUNT_CLOEXEC, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
        if (whole < 0) {
            failed(&m->result, "fsmount");
        } else {
            part = part_of(whole, m->part, &m->result);
            close(whole);
        }
    }
    close(context);
    return part;
}

/* Linux 5.11: mounts on `staging`, which nobody else uses, and takes the part from there. */
static int classic_part(struct mounting *m) {
    char options[OPTIONS_BYTES], path[NAME_BYTES];
    int length = snprintf(options, sizeof options, "lowerdir=%s,upperdir=%s,workdir=%s", m->lowers, m->upper, m->work);
    for (int i = 0; i < OPTION_COUNT && length < OPTIONS_BYTES; i++)
        length += snprintf(options + length, OPTIONS_BYTES - length, ",%s%s%s", OPTIONS[i][0],
                           OPTIONS[i][1] ? "=" : "", OPTIONS[i][1] ? OPTIONS[i][1] : "");
    if (length >= OPTIONS_BYTES) {
        errno = E2BIG;
        return failed(&m->result, "mount options"), -1;
    }
    snprintf(path, sizeof path, "%s/%s", m->staging, m->part);
    if (syscall(SYS_mount, "overlay", m->staging, "overlay", MS_NOSUID | MS_NODEV, options) < 0)
        return failed(&m->result, "mount"), -1;
    int part = part_of(AT_FDCWD, path, &m->result);
    syscall(SYS_umount2, m->staging, DETACH_NOFOLLOW);
    return part;
}

static int mounting_child(void *argument) {
    struct mounting *m = argument;
    if (enter(m->user_ns, m->mount_ns, &m->result))
        return 1;
    /* Short relative paths: what the sandbox reads in its list of mounts names nothing of the host. */
    if (chdir(m->directory) < 0)
        return failed(&m->result, "chdir(layers)");
    m->result.fd = m->classic ? classic_part(m) : detached_part(m);
    return 0;
}

static PyObject *native_mount(PyObject *Py_UNUSED(module), PyObject *args) {
    struct mounting m = {.result = {.fd = -1}};
    int given = PyArg_ParseTuple(args, "iipyyyyyy:mount", &m.user_ns, &m.mount_ns, &m.classic, &m.directory,
                                 &m.lowers, &m.upper, &m.work, &m.part, &m.staging);
    return given && ran(mounting_child, &m, &m.result) ? PyLong_FromLong(m.result.fd) : NULL;
}

/* ---- change -------------------------------------------------------------------------------------------------- */

enum how { COVER, REPLACE, SEAL, UNSEAL };

struct changing {
    int user_ns, mount_ns, how, fd;
    unsigned long long device, inode;
    const char *target;
    struct result result;
};

static int changing_child(void *argument) {
    struct changing *c = argument;
    struct stat there;
    if (enter(c->user_ns, c->mount_ns, &c->result))
        return 1;
    if (stat(c->target, &there) < 0)
        return failed(&c->result, "stat(target)");
    if (there.st_dev != c->device || there.st_ino != c->inode) {
        errno = ESTALE;
        return failed(&c->result, "the target is not what was expected there");
    }
    if (c->how == REPLACE) {
        if (syscall(SYS_umount2, c->target, DETACH_NOFOLLOW) < 0)
            return failed(&c->result, "umount2(target)");
    } else {
        /* What is covered is closed as well: a shell that stands in it can leave nothing there. */
        unsigned long long attributes[4] = {0}; /* struct mount_attr: set, clear, ... */
        attributes[c->how == UNSEAL] = MOUNT_ATTR_RDONLY;
        if (syscall(SYS_mount_setattr, AT_FDCWD, c->target, 0, attributes, sizeof attributes) < 0)
            return failed(&c->result, "mount_setattr(target)");
    }
    if (c->how <= REPLACE && syscall(SYS_move_mount, c->fd, "", AT_FDCWD, c->target, MOVE_MOUNT_F_EMPTY_PATH) < 0)
        return failed(&c->result, "move_mount(target)");
    return 0;
}

static PyObject *native_change(PyObject *Py_UNUSED(module), PyObject *args) {
    struct changing c = {.result = {.fd = -1}};
    int given = PyArg_ParseTuple(args, "iiyKKii:change", &c.user_ns, &c.mount_ns, &c.target, &c.device, &c.inode,
                                 &c.how, &c.fd);
    return given && ran(changing_child, &c, &c.result) ? Py_NewRef(Py_None) : NULL;
}

/* ---- namespaces ---------------------------------------------------------------------------------------------- */

static PyObject *native_start_namespaces(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args)) {
    int ends[2];
    pid_t child;
    if (pipe2(ends, O_CLOEXEC) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_BEGIN_ALLOW_THREADS
    child = (pid_t)syscall(SYS_clone, CLONE_NEWUSER | CLONE_NEWNS, NULL, NULL, NULL, NULL);
    if (child == 0) {
        char byte;
        syscall(SYS_close, ends[1]);
        while (syscall(SYS_read, ends[0], &byte, 1) > 0)
            ;
        syscall(SYS_exit_group, 0);
    }
    Py_END_ALLOW_THREADS
    PyObject *result = child < 0 ? PyErr_SetFromErrno(PyExc_OSError) : Py_BuildValue("(ii)", child, ends[1]);
    close(ends[0]);
    if (child < 0)
        close(ends[1]);
    return result;
}

static PyMethodDef methods[] = {
    {"mount", native_mount, METH_VARARGS, NULL},
    {"change", native_change, METH_VARARGS, NULL},
    {"start_namespaces", native_start_namespaces, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&definition); }
