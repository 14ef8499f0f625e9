package examples

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"strings"

	"sigs.k8s.io/yaml"
)

type indexEntry struct {
	APIVersion  string   `json:"apiVersion"`
	Name        string   `json:"name"`
	Description string   `json:"description"`
	Version     string   `json:"version"`
	AppVersion  string   `json:"appVersion"`
	Digest      string   `json:"digest"`
	URLs        []string `json:"urls"`
}

type index struct {
	APIVersion string                  `json:"apiVersion"`
	Entries    map[string][]indexEntry `json:"entries"`
}

// Repository returns a handler that serves charts as a Helm repository: /index.yaml and /<name>-<version>.tgz. Without charts it
// serves the example chart as it is written. Answers carry an ETag and honour conditional requests.
func Repository(charts ...Chart) (http.Handler, error) {
	if len(charts) == 0 {
		charts = []Chart{{}}
	}
	served := map[string][]byte{}
	listing := index{APIVersion: "v1", Entries: map[string][]indexEntry{}}
	for _, chart := range charts {
		chart = chart.withDefaults()
		archive, err := chart.Archive()
		if err != nil {
			return nil, err
		}
		name := chart.Name + "-" + chart.Version + ".tgz"
		served["/"+name] = archive
		listing.Entries[chart.Name] = append(listing.Entries[chart.Name], indexEntry{
			APIVersion:  "v2",
			Name:        chart.Name,
			Description: "The example chart of Towline",
			Version:     chart.Version,
			AppVersion:  chart.AppVersion,
			Digest:      digest(archive),
			URLs:        []string{name},
		})
	}
	raw, err := yaml.Marshal(listing)
	if err != nil {
		return nil, fmt.Errorf("write the index of the example repository: %w", err)
	}
	served["/index.yaml"] = raw
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { serve(w, r, served) }), nil
}

func serve(w http.ResponseWriter, r *http.Request, served map[string][]byte) {
	// A repository URL that ends in a slash makes some clients ask for //index.yaml.
	name := "/" + strings.TrimLeft(r.URL.Path, "/")
	content, ok := served[name]
	if !ok {
		http.NotFound(w, r)
		return
	}
	w.Header().Set("ETag", `"`+digest(content)+`"`)
	http.ServeContent(w, r, name, epoch(), bytes.NewReader(content))
}

func digest(content []byte) string {
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:])
}
