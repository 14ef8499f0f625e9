package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
)

// size is the number of objects of a kind, and their bytes: keys and values in etcd.
type size struct {
	Objects int `json:"objects"`
	Bytes   int `json:"bytes"`
}

// sizes are the sizes by resource.
type sizes map[string]size

// readSizes reads the sizes of all objects of the API server. Earlier versions of objects, which etcd keeps until it
// compacts them, do not count.
func (e *etcd) readSizes(ctx context.Context) (sizes, error) {
	all := sizes{}
	return all, e.forEach(ctx, registryPrefix, func(object stored) error {
		resource := resourceOf(object.key)
		known := all[resource]
		all[resource] = size{known.Objects + 1, known.Bytes + len(object.key) + len(object.value)}
		return nil
	})
}

// resourceOf returns the resource in the key of an object. An API group with a dot is before the resource.
func resourceOf(key string) string {
	parts := strings.Split(strings.TrimPrefix(key, registryPrefix), "/")
	if strings.Contains(parts[0], ".") && len(parts) > 1 {
		return parts[1]
	}
	return parts[0]
}

// since returns the growth since before, without the resources that have not grown.
func (s sizes) since(before sizes) sizes {
	grown := sizes{}
	for resource, now := range s {
		if bytes := now.Bytes - before[resource].Bytes; bytes > 0 {
			grown[resource] = size{now.Objects - before[resource].Objects, bytes}
		}
	}
	return grown
}

// addStored adds what is stored for the clusters and their profiles: all that a hub without clusters does not store.
func (r *run) addStored(ctx context.Context, result *result) error {
	now, err := r.hub.etcd.readSizes(ctx)
	if err != nil {
		return err
	}
	result.Stored, result.clusters = now.since(r.storedBefore), r.clusters
	total := 0
	for _, s := range result.Stored {
		total += s.Bytes
	}
	result.add("bytes stored per cluster", float64(total)/float64(r.clusters), "")
	if summaries := result.Stored["clustersummaries"].Objects; summaries > 0 {
		delivered := 0
		for _, resource := range []string{"clustersummaries", "configurationgroups", "configurationbundles", "clusterconfigurations"} {
			delivered += result.Stored[resource].Bytes
		}
		result.add("bytes stored per cluster and profile", float64(delivered)/float64(summaries), "")
	}
	return nil
}

// printStored prints the sizes, the largest first.
func (r *result) printStored(out io.Writer) {
	resources := slices.SortedFunc(maps.Keys(r.Stored), func(a, b string) int {
		if r.Stored[a].Bytes != r.Stored[b].Bytes {
			return r.Stored[b].Bytes - r.Stored[a].Bytes
		}
		return strings.Compare(a, b)
	})
	for _, resource := range resources {
		_, _ = fmt.Fprintf(out, "    stored in %d %s per cluster\t%d\n", r.Stored[resource].Objects, resource, r.Stored[resource].Bytes/r.clusters)
	}
}
