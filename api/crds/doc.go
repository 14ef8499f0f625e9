// Package crds embeds the CustomResourceDefinitions generated from the types under api/.
package crds
