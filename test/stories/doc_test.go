// Package stories runs the workflows of users, one file for each story, with the built binaries, the real kubectl and
// real control planes.
package stories
