// Package bench measures what users wait for and pay for, on real control planes: it prints, and does not judge.
package bench
