// Products of bfloat16 matrices on CPUs with AVX-512 BF16. cpu_products.py compiles and calls it.
//
// C = A B, or A B + bias, of A (M, K), B (K, N), C (M, N) and bias (N). Sums are float32, and each
// is rounded once.
//
// A word is two bfloat16 numbers, neighbours along K. One instruction multiplies 16 words of B, of
// a column each, with one word of A, and adds both products of each to 16 sums. A tile of C stays
// in the registers while it runs along K: 14 rows by two vectors of 16 columns are 28 of the 32
// registers. B is packed into panels, whose words lie in the order in which tiles read them; so is
// A, if its words do not lie in memory. All threads share the panels of B, of at most 3,072 x 1,536
// numbers, and each computes rows of its own. A sum has the same order for any number of threads.

#include <Python.h>
#include <immintrin.h>
#include <omp.h>
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>
#include <utility>

namespace {

using Word = uint32_t __attribute__((may_alias));
using Half = uint16_t __attribute__((may_alias));  // a bfloat16

constexpr long ROWS = 14;           // of a tile
constexpr long COLUMNS = 32;        // of a tile, and of a panel of B
constexpr long BLOCK_K = 3072;      // the part of K that is in one block of B
constexpr long BLOCK_N = 1536;      // columns of this block
constexpr long BLOCK_M = 6 * ROWS;  // rows of A that a thread packs: half a megabyte
constexpr long PART_M = 8190;       // rows at once, if K has several blocks: their sums are kept
constexpr long LEAST_M = 4 * ROWS;  // a product of fewer rows is left to PyTorch
constexpr long LEAST_N = 16;        // and one of fewer columns

long ceil_div(long n, long d) { return (n + d - 1) / d; }
// The first n of 32 lanes.
__mmask32 mask_of(long n) { return n >= 32 ? 0xFFFFFFFF : (1u << n) - 1; }

struct Matrix {
  const Half* data;
  long rows, columns, row, column;  // the last two are strides
  const Half* at(long i, long j) const { return data + i * row + j * column; }
};

// ---- packing ------------------------------------------------------------------------------------

// Rows [k, end) at 32 columns, whose numbers are neighbours: words of 16 columns to `out`, and of
// 16 from the column `second` on to `out_second`. Beyond the matrix all is 0.
void pack_rows(const Matrix& x, long k, long end, long column, long second, Word* out,
               Word* out_second, long out_row) {
  alignas(64) int16_t lanes[2][32];
  for (int i = 0; i < 32; i++) {
    lanes[0][i] = i / 2 + i % 2 * 32;
    lanes[1][i] = lanes[0][i] + second;
  }
  const __m512i first_lanes = _mm512_load_si512(lanes[0]);
  const __m512i second_lanes = _mm512_load_si512(lanes[1]);
  const auto store = [&](__m512i upper, __m512i lower) {
    _mm512_store_si512(out, _mm512_permutex2var_epi16(upper, first_lanes, lower));
    _mm512_store_si512(out_second, _mm512_permutex2var_epi16(upper, second_lanes, lower));
    out += out_row, out_second += out_row;
  };
  const __mmask32 columns = mask_of(x.columns - column);
  if (x.columns - column >= 32)  // masks take longer
    for (; k + 1 < end; k += 2)
      store(_mm512_loadu_si512(x.at(k, column)), _mm512_loadu_si512(x.at(k + 1, column)));
  for (; k < end; k += 2)
    store(_mm512_maskz_loadu_epi16(columns, x.at(k, column)),
          _mm512_maskz_loadu_epi16(k + 1 < end ? columns : 0, x.at(k + 1, column)));
}

// 16 words along k, from each of 16 columns whose numbers are neighbours, transposed: out[word]
// has the words of all columns. Squares of 1, 2, 4 and 8 words change places.
void transpose(const Matrix& x, long k, long end, long column, __m512i* out) {
  const long n = x.columns - column;
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++)
    a[i] = _mm512_maskz_loadu_epi16(i < n ? mask_of(end - k) : 0, x.at(k, column + i));
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
#pragma GCC unroll 2
    for (int j = 0; j < 16; j += 8) {
      b[i + j] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0x88);
      b[i + j + 4] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0xDD);
    }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    out[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
    out[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xDD);
  }
}

// The same of 16 columns, each of whose numbers lie together: 16 x 16 words at a time.
void pack_columns(const Matrix& x, long k, long end, long column, Word* out, long out_row) {
  for (; k < end; k += 32, out += 16 * out_row) {
    __m512i words[16];
    transpose(x, k, end, column, words);
    const long pairs = ceil_div(end - k, 2);
#pragma GCC unroll 16
    for (int p = 0; p < 16; p++)
      if (p < pairs) _mm512_store_si512(out + p * out_row, words[p]);
  }
}

// Rows [k, end) of B from a column on: words [pair][32 columns].
void pack_b(const Matrix& B, long k, long end, long column, Word* panel) {
  if (B.column == 1) return pack_rows(B, k, end, column, 16, panel, panel + 16, COLUMNS);
  for (long v = 0; v < COLUMNS; v += 16) pack_columns(B, k, end, column + v, panel + v, COLUMNS);
}

// Columns [k, end) of A for 28 rows: two panels, words [pair][16 rows], of which tiles read 14.
void pack_a(const Matrix& A, long k, long end, long row, Word* panel) {
  const Matrix transposed = {A.data, A.columns, A.rows, A.column, A.row};
  Word* const second = panel + ceil_div(end - k, 2) * 16;
  if (A.row == 1) return pack_rows(transposed, k, end, row, ROWS, panel, second, 16);
  pack_columns(transposed, k, end, row, panel, 16);
  pack_columns(transposed, k, end, row + ROWS, second, 16);
}

// ---- a tile -------------------------------------------------------------------------------------

struct Tile {
  const Word* a;  // word of row r and pair p at [r * a_row + p * a_pair]
  long a_row, a_pair;
  const Word* b;  // panel
  long pairs;
  float* sums;        // of earlier and for later blocks of K; null if there is one block
  long sums_row;      // stride
  bool begins, ends;  // the first block of K, the last one
  Half* c;
  long c_row, columns;
  const Half* bias;  // or null
};

__m512 float32(__m256i x) { return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16); }

template <int R>
void compute(const Tile& t) {
  __m512 sum[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++)
      sum[r][v] = t.begins ? _mm512_setzero_ps() : _mm512_load_ps(t.sums + r * t.sums_row + 16 * v);
  const Word *a = t.a, *b = t.b;
  for (long p = 0; p < t.pairs; p++, a += t.a_pair, b += COLUMNS) {
    const __m512bh b0 = (__m512bh)_mm512_load_si512(b), b1 = (__m512bh)_mm512_load_si512(b + 16);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const __m512bh word = (__m512bh)_mm512_set1_epi32((int)a[r * t.a_row]);
      sum[r][0] = _mm512_dpbf16_ps(sum[r][0], word, b0);
      sum[r][1] = _mm512_dpbf16_ps(sum[r][1], word, b1);
    }
  }
  if (!t.ends) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) _mm512_store_ps(t.sums + r * t.sums_row + 16 * v, sum[r][v]);
    return;
  }
  const __mmask32 columns = mask_of(t.columns);
  __m512 bias[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  if (t.bias) {
    const __m512i halves = _mm512_maskz_loadu_epi16(columns, t.bias);
    bias[0] = float32(_mm512_castsi512_si256(halves));
    bias[1] = float32(_mm512_extracti64x4_epi64(halves, 1));
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    const __m512 low = _mm512_add_ps(sum[r][0], bias[0]), high = _mm512_add_ps(sum[r][1], bias[1]);
    const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    _mm512_mask_storeu_epi16(t.c + r * t.c_row, columns, rounded);
  }
}

template <int... r>
void compute_rows(const Tile& tile, long rows, std::integer_sequence<int, r...>) {
  constexpr void (*functions[])(const Tile&) = {compute<r + 1>...};
  functions[rows - 1](tile);
}

// ---- a product ----------------------------------------------------------------------------------

// Memory that the calling thread keeps for its next product.
Word* workspace(size_t words) {
  thread_local std::unique_ptr<Word, void (*)(void*)> memory(nullptr, std::free);
  thread_local size_t size = 0;
  if (size < words) {
    memory.reset();
    size = 0;
    const size_t whole = ceil_div(words, 1024) * 1024;
    memory.reset((Word*)std::aligned_alloc(4096, whole * sizeof(Word)));
    if (!memory) throw std::bad_alloc();
    size = whole;
  }
  return memory.get();
}

struct Product {
  Matrix A, B;
  const Half* bias;  // or null
  Half* C;
  long c_row;  // stride

  long block_k = ceil_div(ceil_div(A.columns, ceil_div(A.columns, BLOCK_K)), 32) * 32;
  long block_n = std::min(ceil_div(B.columns, COLUMNS) * COLUMNS, BLOCK_N);
  long part_m = A.columns > block_k ? std::min(A.rows, PART_M) : A.rows;
  bool packs_a = A.column != 1 || A.row % 2 || A.columns % 2;  // else its words are there
  Word* packed_b = nullptr;  // (columns / 32, pairs, 32)
  float* sums = nullptr;     // (part_m, block_n), or null if there is one block of K

  void compute(int threads) {
    const long words_b = block_n * block_k / 2, words_a = BLOCK_M / ROWS * 16 * block_k / 2;
    const long words_sums = A.columns > block_k ? part_m * block_n : 0;
    packed_b = workspace(words_b + words_sums + (packs_a ? threads * words_a : 0));
    if (words_sums) sums = (float*)(packed_b + words_b);
    Word* const packed_a = packed_b + words_b + words_sums;
#pragma omp parallel num_threads(threads)
    {
      const long thread = omp_get_thread_num(), n_threads = omp_get_num_threads();
      for (long part = 0; part < A.rows; part += part_m) {
        const long rows = std::min(part_m, A.rows - part), tiles = ceil_div(rows, ROWS);
        const long begin = part + tiles * thread / n_threads * ROWS;
        const long end = part + std::min(tiles * (thread + 1) / n_threads * ROWS, rows);
        for (long n = 0; n < B.columns; n += block_n)
          for (long k = 0; k < A.columns; k += block_k) {
            const long n_end = std::min(n + block_n, B.columns);
            const long k_end = std::min(k + block_k, A.columns);
#pragma omp for
            for (long column = n; column < n_end; column += COLUMNS)
              pack_b(B, k, k_end, column, packed_b + (column - n) * ceil_div(k_end - k, 2));
            for (long m = begin; m < end; m += BLOCK_M)
              compute_block(m, std::min(m + BLOCK_M, end), n, n_end, k, k_end,
                            packed_a + thread * words_a);
#pragma omp barrier
          }
      }
    }
  }

  void compute_block(long m, long m_end, long n, long n_end, long k, long k_end, Word* packed_a) {
    const long pairs = ceil_div(k_end - k, 2);
    const auto panel_a = [&](long row) { return packed_a + (row - m) / ROWS * 16 * pairs; };
    for (long row = m; packs_a && row < m_end; row += 2 * ROWS)
      pack_a(A, k, k_end, row, panel_a(row));
    for (long column = n; column < n_end; column += COLUMNS)
      for (long row = m; row < m_end; row += ROWS) {
        const Tile tile = {
            .a = packs_a ? panel_a(row) : (const Word*)A.at(row, k),
            .a_row = packs_a ? 1 : A.row / 2,
            .a_pair = packs_a ? 16 : 1,
            .b = packed_b + (column - n) * pairs,
            .pairs = pairs,
            .sums = sums ? sums + row % part_m * block_n + column - n : nullptr,
            .sums_row = block_n,
            .begins = k == 0,
            .ends = k_end == A.columns,
            .c = C + row * c_row + column,
            .c_row = c_row,
            .columns = B.columns - column,
            .bias = bias ? bias + column : nullptr,
        };
        compute_rows(tile, std::min(ROWS, m_end - row), std::make_integer_sequence<int, ROWS>());
      }
  }
};

// ---- Python -------------------------------------------------------------------------------------

void* (*data_pointer)(PyObject*);  // of a tensor; PyTorch has its address in the environment
PyObject* bfloat16;                // torch.bfloat16
PyTypeObject *tensor_type, *parameter_type;
PyObject *dtype_name, *is_cpu_name, *shape_name, *stride_name;

// Whether a tensor is a bfloat16 matrix in the CPU's memory; a vector stands for equal rows.
bool read(PyObject* tensor, Matrix& matrix, bool may_be_vector = false) {
  const auto has = [&](PyObject* name, PyObject* expected) {
    PyObject* const value = PyObject_GetAttr(tensor, name);
    Py_XDECREF(value);
    return value == expected;
  };
  if (Py_TYPE(tensor) != tensor_type && Py_TYPE(tensor) != parameter_type) return false;
  if (!has(dtype_name, bfloat16) || !has(is_cpu_name, Py_True)) return false;
  try {
    matrix.data = (const Half*)data_pointer(tensor);
  } catch (const std::exception&) {  // sparse
    return false;
  }
  PyObject* const shape = PyObject_GetAttr(tensor, shape_name);
  PyObject* const strides = shape ? PyObject_CallMethodNoArgs(tensor, stride_name) : nullptr;
  const Py_ssize_t n = strides ? PyTuple_GET_SIZE(shape) : 0;
  if (n == 2 || (n == 1 && may_be_vector)) {
    matrix.columns = PyLong_AsLong(PyTuple_GET_ITEM(shape, n - 1));
    matrix.column = PyLong_AsLong(PyTuple_GET_ITEM(strides, n - 1));
    matrix.rows = n == 1 ? 1 : PyLong_AsLong(PyTuple_GET_ITEM(shape, 0));
    matrix.row = n == 1 ? 0 : PyLong_AsLong(PyTuple_GET_ITEM(strides, 0));
  }
  Py_XDECREF(shape);
  Py_XDECREF(strides);
  return (n == 2 || (n == 1 && may_be_vector)) && matrix.data && !PyErr_Occurred();
}

// product(a, b, bias or None, out, threads): whether it was computed; else nothing was written.
PyObject* product(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  if (given != 5) return PyErr_Format(PyExc_TypeError, "%zd arguments for 5", given);
  const long threads = PyLong_AsLong(arguments[4]);
  if (PyErr_Occurred()) return nullptr;
  if (threads < 1) return PyErr_Format(PyExc_ValueError, "%ld threads", threads);
  Matrix A{}, B{}, C{}, bias{};
  const bool known = read(arguments[0], A) && read(arguments[1], B) && read(arguments[3], C) &&
                     (arguments[2] == Py_None || read(arguments[2], bias, true));
  if (PyErr_Occurred()) return nullptr;
  if (!known) Py_RETURN_FALSE;
  const bool shapes = A.columns == B.rows && C.rows == A.rows && C.columns == B.columns;
  const bool strides = (A.column == 1 || A.row == 1) && (B.column == 1 || B.row == 1) &&
                       C.column == 1 && C.row >= C.columns;
  const bool of_columns = !bias.data || (bias.columns == B.columns && bias.column == 1 &&
                                         bias.row == 0 && (bias.rows == 1 || bias.rows == A.rows));
  const bool apart = C.data != A.data && C.data != B.data && C.data != bias.data;
  const bool large = A.rows >= LEAST_M && B.columns >= LEAST_N && A.columns > 0;
  if (!shapes || !strides || !of_columns || !apart || !large) Py_RETURN_FALSE;
  bool has_memory = true;
  Py_BEGIN_ALLOW_THREADS
  try {
    Product{A, B, bias.data, const_cast<Half*>(C.data), C.row}.compute(threads);
  } catch (const std::bad_alloc&) {
    has_memory = false;
  }
  Py_END_ALLOW_THREADS
  if (!has_memory) return PyErr_NoMemory();
  Py_RETURN_TRUE;
}

PyMethodDef methods[] = {
    {"product", reinterpret_cast<PyCFunction>(product), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "kernel", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_kernel() {
  const char* const address = std::getenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR");
  if (!address) return PyErr_Format(PyExc_ImportError, "PyTorch has set no address");
  data_pointer = reinterpret_cast<void* (*)(PyObject*)>(std::strtoull(address, nullptr, 10));
  dtype_name = PyUnicode_InternFromString("dtype");
  is_cpu_name = PyUnicode_InternFromString("is_cpu");
  shape_name = PyUnicode_InternFromString("shape");
  stride_name = PyUnicode_InternFromString("stride");
  PyObject* const torch = PyImport_ImportModule("torch");
  PyObject* const nn = torch ? PyImport_ImportModule("torch.nn") : nullptr;
  if (!nn) return nullptr;
  bfloat16 = PyObject_GetAttrString(torch, "bfloat16");
  tensor_type = (PyTypeObject*)PyObject_GetAttrString(torch, "Tensor");
  parameter_type = (PyTypeObject*)PyObject_GetAttrString(nn, "Parameter");
  return bfloat16 && tensor_type && parameter_type ? PyModule_Create(&definition) : nullptr;
}
