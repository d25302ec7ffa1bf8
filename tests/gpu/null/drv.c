/* The null GPU, second half: libcuda, the driver that Triton loads. Functions that are not written
 * here return 0 (drv.inc, made by build.sh from Triton's header). Kernels are their names. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <stdlib.h>
extern void ng_count(const char *) __attribute__((weak));
extern int ng_attr(int) __attribute__((weak));
#include "drv.inc"
int cuInit(unsigned f) { return 0; }
int cuDriverGetVersion(int *v) {
  *v = 13000;
  return 0;
}
int cuDeviceGetCount(int *n) {
  *n = 1;
  return 0;
}
int cuDeviceGet(int *d, int o) {
  *d = 0;
  return 0;
}
int cuDeviceGetName(char *s, int n, int d) {
  snprintf(s, n, "NVIDIA H200");
  return 0;
}
int cuDeviceGetAttribute(int *v, int a, int d) {
  *v = ng_attr ? ng_attr(a) : 1;
  return 0;
}
int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *act) {
  *f = 0;
  *act = 1;
  return 0;
}
int cuDevicePrimaryCtxRetain(void **c, int d) {
  *c = (void *)64;
  return 0;
}
int cuCtxGetCurrent(void **c) {
  *c = (void *)64;
  return 0;
}
int cuGetErrorString(int e, const char **s) {
  *s = "null gpu";
  return 0;
}
int cuModuleLoad(void **m, const char *p) {
  *m = (void *)64;
  return 0;
}
int cuModuleLoadData(void **m, const void *p) {
  *m = (void *)64;
  return 0;
}
int cuModuleLoadDataEx(void **m, const void *p) {
  *m = (void *)64;
  return 0;
}
int cuLibraryLoadData(void **m, const void *p) {
  *m = (void *)64;
  return 0;
}
int cuModuleGetFunction(void **f, void *m, const char *n) {
  *f = strdup(n);
  return 0;
}
int cuLibraryGetKernel(void **f, void *m, const char *n) {
  *f = strdup(n);
  return 0;
}
int cuKernelGetFunction(void **f, void *k) {
  *f = k;
  return 0;
}
int cuFuncGetAttribute(int *v, int a, void *f) {
  *v = a == 0 ? 1024 : a == 4 ? 32 : 0;
  return 0;
}
static int k(const char *f) {
  char t[300];
  snprintf(t, 300, "triton:%.280s", f);
  if (ng_count) ng_count(t);
  return 0;
}
int cuLaunchKernel(void *f) { return k(f); }
int cuLaunchCooperativeKernel_(void *f) { return k(f); }
int cuLaunchKernelEx(void *cfg, void *f, void **a, void **b) { return k(f); }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n) {
  *n = 2;
  return 0;
}
int cuOccupancyMaxActiveClusters(int *n) {
  *n = 66;
  return 0;
}
int cuPointerGetAttribute(void *d, int a, unsigned long p) {
  *(unsigned long *)d = p;
  return 0;
}
int cuStreamIsCapturing(void *s, int *st) {
  *st = 0;
  return 0;
}
int cuGetProcAddress_v2(const char *s, void **f, int v, unsigned long fl, int *st) {
  *f = dlsym(RTLD_DEFAULT, s);
  if (st) *st = 0;
  return *f ? 0 : 500;
}
int cuGetProcAddress(const char *s, void **f, int v, unsigned long fl) {
  return cuGetProcAddress_v2(s, f, v, fl, 0);
}
