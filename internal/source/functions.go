package source

import (
	"encoding/json"
	"strings"
	"text/template"

	"github.com/BurntSushi/toml"
	"github.com/Masterminds/sprig/v3"
	"sigs.k8s.io/yaml"
)

// functions returns the functions of templates: conversions, and the functions of Sprig except those that read the
// environment or the clock or return random values.
func functions() template.FuncMap {
	funcs := sprig.HermeticTxtFuncMap()
	// Sprig lists these as hermetic although they return random values or read the clock.
	for _, name := range []string{
		"ago", "bcrypt", "encryptAES", "genCA", "genCAWithKey", "genPrivateKey", "genSelfSignedCert", "genSelfSignedCertWithKey",
		"genSignedCert", "genSignedCertWithKey", "htpasswd", "randInt", "shuffle",
	} {
		delete(funcs, name)
	}
	funcs["toYaml"] = toYAML
	funcs["fromYaml"] = parse[map[string]any](yamlUnmarshal)
	funcs["fromYamlArray"] = parse[[]any](yamlUnmarshal)
	funcs["fromJson"] = parse[map[string]any](json.Unmarshal)
	funcs["fromJsonArray"] = parse[[]any](json.Unmarshal)
	funcs["toToml"] = toTOML
	funcs["fromToml"] = parse[map[string]any](toml.Unmarshal)
	return funcs
}

func toYAML(value any) (string, error) {
	raw, err := yaml.Marshal(value)
	return strings.TrimSuffix(string(raw), "\n"), err
}

func toTOML(value any) (string, error) {
	raw, err := toml.Marshal(value)
	return string(raw), err
}

func yamlUnmarshal(raw []byte, into any) error { return yaml.Unmarshal(raw, into) }

// parse returns a template function that parses text as a T.
func parse[T any](unmarshal func([]byte, any) error) func(string) (T, error) {
	return func(text string) (T, error) {
		var value T
		err := unmarshal([]byte(text), &value)
		return value, err
	}
}
