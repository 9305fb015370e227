/* Copies with non-temporal stores; see `nontemporal` for when and why, and for the fallback without them.

   A non-temporal store of whole cache lines goes straight to memory: the processor neither reads the lines
   before it writes them nor keeps them in a cache afterwards. SSE2 is enough for that and part of every
   x86-64; wider stores write the same lines. */

#include <pyconfig.h>
#ifndef Py_GIL_DISABLED /* a free-threaded Python has no stable ABI */
#define Py_LIMITED_API 0x030A0000 /* one build serves Python 3.10 and later */
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <emmintrin.h>
#include <stdint.h>
#include <string.h>

#define LINE 64 /* bytes of a cache line */

static char *copy_piece(char *target, const char *source, size_t nbytes)
{
    size_t head = (LINE - (uintptr_t)target % LINE) % LINE;
    if (head > nbytes)
        head = nbytes;
    memcpy(target, source, head);
    target += head, source += head, nbytes -= head;
    for (; nbytes >= LINE; target += LINE, source += LINE, nbytes -= LINE) {
        const __m128i *from = (const __m128i *)source;
        __m128i *to = (__m128i *)target;
        __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
        __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
        _mm_stream_si128(to, a);
        _mm_stream_si128(to + 1, b);
        _mm_stream_si128(to + 2, c);
        _mm_stream_si128(to + 3, d);
    }
    memcpy(target, source, nbytes);
    return target + nbytes;
}

PyDoc_STRVAR(copy_doc,
"copy(target, sources, nbytes)\n--\n\n"
"Copy nbytes from each of the addresses in the list `sources`, one after the other, to the address\n"
"`target`. Nothing is checked, as in `ctypes.memmove`; overlapping bytes are not copied correctly.");

static PyObject *copy(PyObject *module, PyObject *arguments)
{
    PyObject *target_address, *sources;
    Py_ssize_t nbytes;
    if (!PyArg_ParseTuple(arguments, "OO!n:copy", &target_address, &PyList_Type, &sources, &nbytes))
        return NULL;
    if (nbytes < 0)
        return PyErr_Format(PyExc_ValueError, "nbytes must not be negative, got %zd", nbytes);
    char *target = PyLong_AsVoidPtr(target_address);
    if (target == NULL && PyErr_Occurred())
        return NULL;
    PyObject *addresses = PyList_AsTuple(sources); /* without the GIL another thread may change the list */
    if (addresses == NULL)
        return NULL;
    Py_ssize_t count = PyTuple_Size(addresses);
    const char **pieces = PyMem_Malloc(count ? (size_t)count * sizeof *pieces : 1);
    if (pieces == NULL)
        PyErr_NoMemory();
    for (Py_ssize_t at = 0; at < count && !PyErr_Occurred(); at++)
        pieces[at] = PyLong_AsVoidPtr(PyTuple_GetItem(addresses, at));
    Py_DECREF(addresses);
    if (PyErr_Occurred()) {
        PyMem_Free(pieces);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < count; at++)
        target = copy_piece(target, pieces[at], (size_t)nbytes);
    _mm_sfence(); /* later stores may overtake these: the batch must be complete before it is announced */
    Py_END_ALLOW_THREADS
    PyMem_Free(pieces);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {{"copy", copy, METH_VARARGS, copy_doc}, {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED}, /* the module has no state */
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_nontemporal",
    .m_doc = "Copies with non-temporal stores.",
    .m_size = 0,
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__nontemporal(void)
{
    return PyModuleDef_Init(&definition);
}
