// Package examples holds what the README shows and the demo applies: profiles, and a small chart with a Helm repository to serve it.
package examples
