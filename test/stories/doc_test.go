// Package stories tells what users do with Towline, one file a story, with the built binaries, the real kubectl and
// real control planes.
package stories
