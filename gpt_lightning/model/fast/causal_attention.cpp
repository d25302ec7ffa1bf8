// Causal attention in bfloat16 for CPUs with AVX-512 BF16. cpu_attention.py compiles and calls it.
//
// A task is one head of one sequence. It computes ROWS queries at a time against the keys that they
// see, so that the half of the (T, T) matrix that the mask removes is neither multiplied nor
// stored. Scores and sums are float32; the weights, and the gradients of the scores, are rounded to
// bfloat16 for the products that use them, as in autocast. The backward computes the weights again.
// Each output is a sum in a fixed order, for any number of threads.
//
// Shapes: tensors are (B, nh, T, hs) with the strides (batch, head, token, 1), in elements; T and
// hs are multiples of 32. A word is two bfloat16 numbers that one instruction multiplies and adds.

#include <immintrin.h>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>

namespace {

constexpr long ROWS = 32;   // queries of a block
constexpr long TILE_M = 8;  // a product's registers: 8 rows by 2 vectors of 16 columns
constexpr long TILE_N = 32;

using Word = uint32_t __attribute__((may_alias));
using Half = uint16_t __attribute__((may_alias));  // a bfloat16

struct View {
  Half* data;
  long batch, head, token;
  Half* of(long b, long h) const { return data + b * batch + h * head; }
};

// Numbers of a call: B, nh, T, hs, threads, the addresses of seeds and lse, and four per View.
struct Problem {
  long B, nh, T, hs, threads;
  float scale;           // factor of the scores
  float keep;            // 1 / (1 - dropout)
  int32_t least;         // hash of an element that is kept
  const int32_t* seeds;  // null without dropout
  float* lse;
  const View* views;

  Problem(const long* numbers, double dropout)
      : B(numbers[0]), nh(numbers[1]), T(numbers[2]), hs(numbers[3]), threads(numbers[4]),
        scale(1 / std::sqrt((double)hs)),
        keep(1 / (1 - dropout)), least(std::nearbyint(dropout * 0x1p32) - 0x1p31),
        seeds((const int32_t*)numbers[5]), lse((float*)numbers[6]),
        views((const View*)(numbers + 7)) {}
};

// C (m, n) = A B, or C += A B. Words of A at [row * a_row + pair * a_pair], of B at [pair * n + c].
void product(const Word* A, long a_row, long a_pair, const Word* B, long b_pair, float* C,
             long c_row, long m, long n, long pairs, bool add) {
  for (long i = 0; i < m; i += TILE_M)
    for (long j = 0; j < n; j += TILE_N) {
      __m512 sum[TILE_M][2];
#pragma GCC unroll 8
      for (long r = 0; r < TILE_M; r++)
        for (long v = 0; v < 2; v++)
          sum[r][v] = add ? _mm512_loadu_ps(C + (i + r) * c_row + j + 16 * v) : _mm512_setzero_ps();
      for (long p = 0; p < pairs; p++) {
        const __m512bh b0 = (__m512bh)_mm512_loadu_si512(B + p * b_pair + j);
        const __m512bh b1 = (__m512bh)_mm512_loadu_si512(B + p * b_pair + j + 16);
#pragma GCC unroll 8
        for (long r = 0; r < TILE_M; r++) {
          const __m512bh a = (__m512bh)_mm512_set1_epi32(A[(i + r) * a_row + p * a_pair]);
          sum[r][0] = _mm512_dpbf16_ps(sum[r][0], a, b0);
          sum[r][1] = _mm512_dpbf16_ps(sum[r][1], a, b1);
        }
      }
#pragma GCC unroll 8
      for (long r = 0; r < TILE_M; r++)
        for (long v = 0; v < 2; v++) _mm512_storeu_ps(C + (i + r) * c_row + j + 16 * v, sum[r][v]);
    }
}

const __m512i LANE = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);

// Words of two neighbouring channels, transposed: (hs / 2, T). In blocks of 16 x 16 words, the
// squares of 8, 4, 2 and 1 words beside the diagonal change places. A gather takes far longer.
void pack_channels(const Half* x, long token, long T, long hs, Word* out) {
  for (long t = 0; t < T; t += 16)
    for (long c = 0; c < hs; c += 32) {
      __m512i rows[16];
#pragma GCC unroll 16
      for (int r = 0; r < 16; r++) rows[r] = _mm512_loadu_si512(x + (t + r) * token + c);
#pragma GCC unroll 4
      for (int half = 8; half; half /= 2) {
        const __mmask16 right = _mm512_test_epi32_mask(LANE, _mm512_set1_epi32(half));
        const __m512i first =
            _mm512_mask_add_epi32(LANE, right, LANE, _mm512_set1_epi32(16 - half));
        const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(half));
#pragma GCC unroll 16
        for (int r = 0; r < 16; r++)
          if (!(r & half)) {
            const __m512i low = rows[r], high = rows[r + half];
            rows[r] = _mm512_permutex2var_epi32(low, first, high);
            rows[r + half] = _mm512_permutex2var_epi32(low, second, high);
          }
      }
#pragma GCC unroll 16
      for (int r = 0; r < 16; r++) _mm512_storeu_si512(out + (c / 2 + r) * T + t, rows[r]);
    }
}

// Words of two neighbouring rows of a matrix (m, n): (m / 2, n).
void pack_rows(const Half* x, long row, long m, long n, Word* out, long out_row) {
  const auto load = [](const Half* from) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
  };
  for (long i = 0; i < m; i += 2)
    for (long j = 0; j < n; j += 16) {
      const __m512i high = _mm512_slli_epi32(load(x + (i + 1) * row + j), 16);
      _mm512_storeu_si512(out + i / 2 * out_row + j, _mm512_or_si512(load(x + i * row + j), high));
    }
}

__m512 exponential(__m512 x) {  // relative error 2e-7; exactly 0 far below 0
  x = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, whole);  // fraction in [-1/2, 1/2]
  __m512 y = _mm512_set1_ps(1.5403530e-4f);  // Taylor series of 2^f
  for (float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(c));
  return _mm512_scalef_ps(y, whole);
}

__m512i mixed(__m512i h, int shift, Word factor) {
  h = _mm512_xor_si512(h, _mm512_srli_epi32(h, shift));
  return _mm512_mullo_epi32(h, _mm512_set1_epi32((int)factor));
}

// Elements [index, index + 16) of the flat (B, nh, T, T) matrix that dropout keeps: cpu_kernels.py.
__mmask16 kept(const Problem& s, Word index) {
  if (!s.seeds) return 0xFFFF;
  __m512i h = _mm512_add_epi32(LANE, _mm512_set1_epi32((int)(index + (Word)s.seeds[0])));
  h = _mm512_xor_si512(mixed(h, 17, 0xED5AD4BB), _mm512_set1_epi32(s.seeds[1]));
  h = mixed(mixed(h, 11, 0xAC4C1B51), 15, 0x31848BAB);
  return _mm512_cmpge_epi32_mask(h, _mm512_set1_epi32(s.least));
}

__mmask16 seen(long query, long key) {  // mask of the keys [key, key + 16)
  const long n = query - key + 1;
  return n >= 16 ? 0xFFFF : n <= 0 ? 0 : (__mmask16)((1 << n) - 1);
}

void store_rounded(Half* to, __m512 x) {
  _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(x));
}

// The rows of a matrix (m, n), each times its factor, in bfloat16.
void store_rounded(const float* from, const float* factors, Half* to, long to_row, long m, long n) {
  for (long i = 0; i < m; i++) {
    const __m512 factor = _mm512_set1_ps(factors ? factors[i] : 1);
    for (long j = 0; j < n; j += 16)
      store_rounded(to + i * to_row + j, _mm512_mul_ps(_mm512_loadu_ps(from + i * n + j), factor));
  }
}

template <typename T>
std::unique_ptr<T[]> buffer(long n) {
  return std::unique_ptr<T[]>(new T[n]);
}

}  // namespace

// y and lse (B, nh, T), the logarithm of each row's sum of exponentials, from q, k and v.
extern "C" void forward(const long* numbers, double dropout) {
  const Problem s(numbers, dropout);
  const View *q = s.views, *k = q + 1, *v = q + 2, *y = q + 3;
  float* lse = s.lse;
  const long T = s.T, hs = s.hs;
  const __m512 scale = _mm512_set1_ps(s.scale);
#pragma omp parallel num_threads(s.threads)
  {
    auto keys = buffer<Word>(T * hs / 2), values = buffer<Word>(T * hs / 2);
    auto scores = buffer<float>(ROWS * T), sums = buffer<float>(ROWS * hs);
    auto weights = buffer<Half>(ROWS * T);
#pragma omp for
    for (long task = 0; task < s.B * s.nh; task++) {
      const long b = task / s.nh, h = task % s.nh;
      pack_channels(k->of(b, h), k->token, T, hs, keys.get());
      pack_rows(v->of(b, h), v->token, T, hs, values.get(), hs);
      for (long t = 0; t < T; t += ROWS) {
        const long n = t + ROWS;  // keys that a query of the block sees
        const Word* queries = (const Word*)(q->of(b, h) + t * q->token);
        product(queries, q->token / 2, 1, keys.get(), T, scores.get(), T, ROWS, n, hs / 2, false);
        float factors[ROWS];
        for (long i = 0; i < ROWS; i++) {
          float* row = scores.get() + i * T;
          __m512 top = _mm512_set1_ps(-1e30f);
          for (long j = 0; j < n; j += 16)
            top = _mm512_mask_max_ps(top, seen(t + i, j), top, _mm512_loadu_ps(row + j));
          const float most = s.scale * _mm512_reduce_max_ps(top);
          __m512 sum = _mm512_setzero_ps();
          for (long j = 0; j < n; j += 16) {
            const __m512 x =
                _mm512_fmsub_ps(_mm512_loadu_ps(row + j), scale, _mm512_set1_ps(most));
            const __m512 e = _mm512_maskz_mov_ps(seen(t + i, j), exponential(x));
            sum = _mm512_add_ps(sum, e);
            const Word index = (Word)((task * T + t + i) * T + j);
            store_rounded(weights.get() + i * T + j, _mm512_maskz_mov_ps(kept(s, index), e));
          }
          const float total = _mm512_reduce_add_ps(sum);
          lse[task * T + t + i] = most + std::log(total);
          factors[i] = s.keep / total;
        }
        product((const Word*)weights.get(), T / 2, 1, values.get(), hs, sums.get(), hs, ROWS, hs,
                n / 2, false);
        store_rounded(sums.get(), factors, y->of(b, h) + t * y->token, y->token, ROWS, hs);
      }
    }
  }
}

// Gradients of q, k and v from that of y.
extern "C" void backward(const long* numbers, double dropout) {
  const Problem s(numbers, dropout);
  const View *dy = s.views, *q = dy + 1, *k = dy + 2, *v = dy + 3;
  const View *dq = dy + 4, *dk = dy + 5, *dv = dy + 6;
  const float* lse = s.lse;
  const long T = s.T, hs = s.hs;
  const __m512 scale = _mm512_set1_ps(s.scale);
#pragma omp parallel num_threads(s.threads)
  {
    auto keys = buffer<Word>(T * hs / 2), values = buffer<Word>(T * hs / 2);
    auto key_pairs = buffer<Word>(T * hs / 2), pairs = buffer<Word>(ROWS * hs / 2);
    auto p = buffer<float>(ROWS * T), dp = buffer<float>(ROWS * T), sums = buffer<float>(ROWS * hs);
    auto sums_k = buffer<float>(T * hs), sums_v = buffer<float>(T * hs);
    auto rounded = buffer<Half>(ROWS * T);
    auto columns = buffer<Word>(ROWS * T / 2);
#pragma omp for
    for (long task = 0; task < s.B * s.nh; task++) {
      const long b = task / s.nh, h = task % s.nh;
      pack_channels(k->of(b, h), k->token, T, hs, keys.get());
      pack_channels(v->of(b, h), v->token, T, hs, values.get());
      pack_rows(k->of(b, h), k->token, T, hs, key_pairs.get(), hs);
      memset(sums_k.get(), 0, T * hs * sizeof(float));
      memset(sums_v.get(), 0, T * hs * sizeof(float));
      for (long t = 0; t < T; t += ROWS) {
        const long n = t + ROWS;
        const Half* queries = q->of(b, h) + t * q->token;
        const Half* upstream = dy->of(b, h) + t * dy->token;
        product((const Word*)queries, q->token / 2, 1, keys.get(), T, p.get(), T, ROWS, n, hs / 2,
                false);
        product((const Word*)upstream, dy->token / 2, 1, values.get(), T, dp.get(), T, ROWS, n,
                hs / 2, false);
        float dots[ROWS];  // products of each row's weights and their gradients
        for (long i = 0; i < ROWS; i++) {
          __m512 dot = _mm512_setzero_ps();
          const __m512 minus = _mm512_set1_ps(lse[task * T + t + i]);
          for (long j = 0; j < n; j += 16) {
            float* weight = p.get() + i * T + j;
            float* gradient = dp.get() + i * T + j;
            const __m512 x = _mm512_fmsub_ps(_mm512_loadu_ps(weight), scale, minus);
            const __m512 e = _mm512_maskz_mov_ps(seen(t + i, j), exponential(x));
            const __mmask16 kept_here = kept(s, (Word)((task * T + t + i) * T + j));
            const __m512 keep = _mm512_maskz_mov_ps(kept_here, _mm512_set1_ps(s.keep));
            const __m512 g = _mm512_mul_ps(_mm512_loadu_ps(gradient), keep);
            dot = _mm512_fmadd_ps(e, g, dot);
            store_rounded(rounded.get() + i * T + j, _mm512_mul_ps(e, keep));
            _mm512_storeu_ps(weight, e);
            _mm512_storeu_ps(gradient, g);
          }
          dots[i] = _mm512_reduce_add_ps(dot);
        }
        pack_rows(rounded.get(), T, ROWS, n, columns.get(), T);
        pack_rows(upstream, dy->token, ROWS, hs, pairs.get(), hs);
        product(columns.get(), 1, T, pairs.get(), hs, sums_v.get(), hs, n, hs, ROWS / 2, true);
        for (long i = 0; i < ROWS; i++)
          for (long j = 0; j < n; j += 16) {
            const __m512 e = _mm512_mul_ps(_mm512_loadu_ps(p.get() + i * T + j), scale);
            const __m512 g = _mm512_loadu_ps(dp.get() + i * T + j);
            const __m512 ds = _mm512_mul_ps(e, _mm512_sub_ps(g, _mm512_set1_ps(dots[i])));
            store_rounded(rounded.get() + i * T + j, ds);
          }
        product((const Word*)rounded.get(), T / 2, 1, key_pairs.get(), hs, sums.get(), hs, ROWS, hs,
                n / 2, false);
        store_rounded(sums.get(), nullptr, dq->of(b, h) + t * dq->token, dq->token, ROWS, hs);
        pack_rows(rounded.get(), T, ROWS, n, columns.get(), T);
        pack_rows(queries, q->token, ROWS, hs, pairs.get(), hs);
        product(columns.get(), 1, T, pairs.get(), hs, sums_k.get(), hs, n, hs, ROWS / 2, true);
      }
      store_rounded(sums_k.get(), nullptr, dk->of(b, h), dk->token, T, hs);
      store_rounded(sums_v.get(), nullptr, dv->of(b, h), dv->token, T, hs);
    }
  }
}
