package source

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"text/template"
	"time"
	_ "time/tzdata" // the image of the hub has no time zones

	"github.com/BurntSushi/toml"
	"github.com/Masterminds/sprig/v3"
	"sigs.k8s.io/yaml"

	"github.com/towline/towline/internal/kube"
)

// functions returns the deterministic template functions: conversions, and the functions of Sprig that neither read the
// environment or the clock nor return random values (docs/adr/0016-functions-of-templates.md). keys and values are
// sorted by key.
func functions() template.FuncMap {
	funcs := sprig.HermeticTxtFuncMap()
	// Sprig lists these as hermetic although they return random values or read the clock.
	for _, name := range []string{
		"ago", "bcrypt", "encryptAES", "genCA", "genCAWithKey", "genPrivateKey", "genSelfSignedCert", "genSelfSignedCertWithKey",
		"genSignedCert", "genSignedCertWithKey", "htpasswd", "randInt", "shuffle",
	} {
		delete(funcs, name)
	}
	maps.Copy(funcs, timeFunctions())
	funcs["keys"], funcs["values"] = sortedKeys, sortedValues
	funcs["toYaml"] = toYAML
	funcs["fromYaml"] = parse[map[string]any](yamlUnmarshal)
	funcs["fromYamlArray"] = parse[[]any](yamlUnmarshal)
	funcs["fromJson"] = parse[map[string]any](json.Unmarshal)
	funcs["fromJsonArray"] = parse[[]any](json.Unmarshal)
	funcs["toToml"] = toTOML
	funcs["fromToml"] = parse[map[string]any](toml.Unmarshal)
	return funcs
}

// timeFunctions replaces Sprig's time functions, which use the time zone of the machine, and the current time if the
// value is not a time.
func timeFunctions() template.FuncMap {
	inZone := func(layout string, value any, zone string) (string, error) {
		location, err := time.LoadLocation(zone)
		if err != nil || zone == "Local" {
			return "", fmt.Errorf("time zone %q is not known", zone)
		}
		moment, err := toTime(value)
		return moment.In(location).Format(layout), err
	}
	utc := func(layout string, value any) (string, error) { return inZone(layout, value, "UTC") }
	htmlInZone := func(value any, zone string) (string, error) { return inZone(time.DateOnly, value, zone) }
	sprigFuncs := sprig.TxtFuncMap()
	return template.FuncMap{
		"date": utc, "dateInZone": inZone, "date_in_zone": inZone, "htmlDateInZone": htmlInZone,
		"htmlDate":   func(value any) (string, error) { return utc(time.DateOnly, value) },
		"dateModify": sprigFuncs["dateModify"], "date_modify": sprigFuncs["date_modify"],
		"toDate": func(layout, text string) time.Time {
			moment, _ := time.ParseInLocation(layout, text, time.UTC) // the zero time, as in Sprig
			return moment
		},
		"mustToDate": func(layout, text string) (time.Time, error) { return time.ParseInLocation(layout, text, time.UTC) },
		"durationRound": func(value any) (string, error) {
			if _, isTime := value.(time.Time); isTime {
				return "", errors.New("the time since then differs each time")
			}
			return sprigFuncs["durationRound"].(func(any) string)(value), nil
		},
	}
}

// toTime converts a value of a template, a time or the seconds since 1970, to a time.
func toTime(value any) (time.Time, error) {
	switch value := value.(type) {
	case time.Time:
		return value, nil
	case int64:
		return time.Unix(value, 0), nil
	case int:
		return time.Unix(int64(value), 0), nil
	}
	return time.Time{}, fmt.Errorf("a %T is no time; mustToDate makes one of a text", value)
}

// sortedKeys is Sprig's keys with a fixed order: the keys of each map are sorted.
func sortedKeys(dicts ...map[string]any) []string {
	all := []string{}
	for _, dict := range dicts {
		all = append(all, slices.Sorted(maps.Keys(dict))...)
	}
	return all
}

// sortedValues is Sprig's values with a fixed order: by key.
func sortedValues(dict map[string]any) []any {
	all := []any{}
	for _, key := range slices.Sorted(maps.Keys(dict)) {
		all = append(all, dict[key])
	}
	return all
}

func toYAML(value any) (string, error) {
	raw, err := yaml.Marshal(value)
	return strings.TrimSuffix(string(raw), "\n"), err
}

func toTOML(value any) (string, error) {
	raw, err := toml.Marshal(value)
	return string(raw), err
}

func yamlUnmarshal(raw []byte, into any) error { return kube.UnmarshalYAML(raw, into) }

// parse returns a template function that parses text as a T.
func parse[T any](unmarshal func([]byte, any) error) func(string) (T, error) {
	return func(text string) (T, error) {
		var value T
		err := unmarshal([]byte(text), &value)
		return value, err
	}
}
