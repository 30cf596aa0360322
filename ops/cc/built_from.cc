// The digest of the sources that the library was built from. ops/library.py compares it with the
// digest of the sources in ops/cc: an old library may take the same arguments and give other
// results.
extern "C" {
extern const char ctr_sources[] = CTR_SOURCES;
}
