// Package works makes a cluster equal the Works of its execution space, and says in them what became of it.
package works
