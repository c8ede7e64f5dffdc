/* A column of numbers as bytes, which for a long rollout is most of what it costs to write it down.
 * columns.py holds the same in Python and says what the bytes mean. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <endian.h>
#include <stdint.h>
#include <string.h>

/* The bits of a number in a column so wide: 1 where it fits, 0 where it does not, -1 with an exception. */
typedef int bits_of(PyObject *number, int width, uint64_t *bits);

static inline int bits_of_integer(PyObject *number, int width, uint64_t *bits) {
    long long value = PyLong_AsLongLong(number);
    if (value == -1 && PyErr_Occurred()) return -1;
    *bits = (uint64_t)value;
    if (width == 8) return 1;
    long long beyond = 1LL << (8 * width - 1);
    return -beyond <= value && value < beyond;
}

static inline int bits_of_float(PyObject *number, int width, uint64_t *bits) {
    double value = PyFloat_AsDouble(number);
    if (value == -1.0 && PyErr_Occurred()) return -1;
    memcpy(bits, &value, sizeof value);
    if (width == 8) return 1;
    float single = (float)value;
    double again = single;
    uint64_t bits_again;
    uint32_t narrow;
    memcpy(&bits_again, &again, sizeof again);
    memcpy(&narrow, &single, sizeof single);
    int fits = bits_again == *bits;
    *bits = narrow;
    return fits;
}

static inline __attribute__((always_inline)) PyObject *column(PyObject *arguments, bits_of *bits_of, int least_width) {
    PyObject *values;
    int width;
    if (!PyArg_ParseTuple(arguments, "O!i", &PyList_Type, &values, &width)) return NULL;
    if (width < least_width || width > 8) return PyErr_Format(PyExc_ValueError, "a number in %d bytes", width);
    Py_ssize_t count = PyList_Size(values);
    PyObject *result = PyBytes_FromStringAndSize(NULL, count * width);
    if (!result) return NULL;
    char *to = PyBytes_AsString(result), *end = to + count * width;
    PyObject *previous = NULL; /* where one object fills a run, as in a mask, it is looked at once */
    uint64_t bits = 0;
    for (Py_ssize_t i = 0; i < count; i++, to += width) {
        PyObject *number = PyList_GetItem(values, i);
        int fits = number ? 1 : -1;
        if (number && number != previous) {
            int plain = PyLong_CheckExact(number) || PyFloat_CheckExact(number);
            /* Any other may run code of its own, which may take it out of the list. */
            if (!plain) Py_INCREF(number);
            fits = bits_of(number, width, &bits);
            bits = htole64(bits);
            if (!plain) Py_DECREF(number);
            previous = plain ? number : NULL;
        }
        if (fits != 1) {
            Py_DECREF(result);
            if (fits < 0) return NULL;
            Py_RETURN_NONE;
        }
        if (end - to >= (Py_ssize_t)sizeof bits)
            memcpy(to, &bits, sizeof bits); /* the next number overwrites what is too much */
        else
            memcpy(to, &bits, (size_t)width);
    }
    return result;
}

static PyObject *integers(PyObject *module, PyObject *arguments) {
    (void)module;
    return column(arguments, bits_of_integer, 1);
}

static PyObject *floats(PyObject *module, PyObject *arguments) {
    (void)module;
    return column(arguments, bits_of_float, 4);
}

static PyMethodDef functions[] = {
    {"integers", integers, METH_VARARGS, "Whole numbers, so many bytes each; None where one does not fit."},
    {"floats", floats, METH_VARARGS, "Floating point, 4 or 8 bytes each; None where one would lose a bit."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "Packs columns; see columns.py.", -1, functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&definition); }
