package source

import "testing"

func TestRegistryHost(t *testing.T) {
	t.Parallel()
	for address, want := range map[string]string{
		"oci://example.com:5000/charts": "example.com:5000", "https://my_registry/a": "my_registry", "127.0.0.1:5000": "127.0.0.1:5000",
		"oci://[::1]:5000/a": "[::1]:5000", "http://example.com:/": "example.com", "docker.io": "registry-1.docker.io", "localhost": "localhost",
		"oci://": "", "oci://:0": "", "oci://::": "", "oci://:::": "", "oci://[x]/": "", "https://-/": "", "https://a b/": "",
	} {
		if got, err := registryHost(address); got != want || (err != nil) != (want == "") {
			t.Errorf("%s: got %q and %v, want %q", address, got, err, want)
		}
	}
}
