// Package status folds reports into the status and events people read.
package status
