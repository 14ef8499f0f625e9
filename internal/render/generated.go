package render

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path"
	"reflect"
	"slices"
	"strings"
	"text/template"
	"time"

	"github.com/Masterminds/sprig/v3"
	helmchart "helm.sh/helm/v4/pkg/chart/v2"
	kubejson "k8s.io/apimachinery/pkg/util/json"
)

// Generated holds the results of the template functions of a release that may return another result at every call, as
// JSON: randAlphaNum, genCA, now and the like, and lookup. The keys name the call: the template, the function, a digest
// of the arguments, and the number of the call. A key of lookup has a digest of the chart, the values and the options
// instead of the template: Helm reads the cluster when a person installs or upgrades a release, and finding the objects
// that were deployed then must not look like another upgrade.
type Generated map[string]json.RawMessage

// lookupPrefix begins the keys of the results of lookup.
const lookupPrefix = "lookup "

// Add returns the results to keep after a rendering that used some: these, and all others but those of lookup.
func (g Generated) Add(used Generated) Generated {
	all := g.WithoutLookup()
	maps.Copy(all, used)
	return all
}

// WithoutLookup returns a copy of g without the results of lookup.
func (g Generated) WithoutLookup() Generated {
	rest := make(Generated, len(g))
	for key, result := range g {
		if !strings.HasPrefix(key, lookupPrefix) {
			rest[key] = result
		}
	}
	return rest
}

// LookupFunc reads objects of a cluster for templates: one object, or a list if name is empty. Something that does not exist is an
// empty map.
type LookupFunc = func(apiVersion, kind, namespace, name string) (map[string]any, error)

// errGenerates ends a rendering that is meant for several members and generates a value.
var errGenerates = errors.New("it generates values")

// The functions that mark where a template begins and ends.
const (
	beginTemplate = "towlineBeginTemplate"
	endTemplate   = "towlineEndTemplate"
)

// calls provides the template functions of one rendering whose results depend on more than their arguments.
type calls struct {
	// ofMember says that the rendering is for one release on one member: functions may generate values, and lookup reads the member.
	ofMember bool
	// kept are the results of former renderings, used those of this one.
	kept, used Generated
	lookup     LookupFunc
	// inputs is a digest of the chart, the values and the options.
	inputs string
	// generates and looksUp say which functions were called, failure why lookup failed.
	generates, looksUp bool
	failure            error
	// templates are those that are being executed, the innermost last.
	templates []execution
}

// execution is one execution of a template.
type execution struct {
	path   string
	counts map[string]int // of equal calls
}

// functions returns the functions that replace those of Helm.
func (c *calls) functions() template.FuncMap {
	functions := template.FuncMap{
		beginTemplate: func(path string) string {
			c.templates = append(c.templates, execution{path: path, counts: map[string]int{}})
			return ""
		},
		endTemplate: func() string {
			c.templates = c.templates[:len(c.templates)-1]
			return ""
		},
		"lookup": c.lookUp,
		"keys":   sortedKeys,
		"values": sortedValues,
	}
	original := sprig.TxtFuncMap()
	for _, name := range []string{
		"randAlphaNum", "randAlpha", "randAscii", "randNumeric", "randBytes", "randInt", "shuffle", "uuidv4",
		"genPrivateKey", "genCA", "genCAWithKey", "genSelfSignedCert", "genSelfSignedCertWithKey", "genSignedCert", "genSignedCertWithKey",
		"bcrypt", "htpasswd", "encryptAES",
		"now", "ago", "date", "dateInZone", "date_in_zone", "htmlDate", "htmlDateInZone", "durationRound",
	} {
		functions[name] = c.keepResults(name, original[name])
	}
	return functions
}

// lookUp finds nothing in a rendering that several members may share. It reads the member once for the same inputs.
func (c *calls) lookUp(apiVersion, kind, namespace, name string) (map[string]any, error) {
	c.looksUp = true
	if !c.ofMember || c.lookup == nil {
		return map[string]any{}, nil
	}
	key := fmt.Sprintf("%s%s %x", lookupPrefix, c.inputs, sha256.Sum256([]byte(strings.Join([]string{apiVersion, kind, namespace, name}, "\x00"))))
	kept, ok := c.used[key]
	if !ok {
		kept, ok = c.kept[key]
	}
	if !ok {
		found, err := c.lookup(apiVersion, kind, namespace, name)
		if err == nil {
			kept, err = json.Marshal(found)
		}
		if err != nil {
			c.failure = fmt.Errorf("look up %s %s %s/%s: %w", apiVersion, kind, namespace, name, err)
			return nil, c.failure
		}
	}
	c.used[key] = kept
	var found map[string]any
	err := kubejson.Unmarshal(kept, &found) // integers stay integers
	return found, err
}

// keepResults returns a function of the same type that returns the kept result of the same call, if there is one.
func (c *calls) keepResults(name string, function any) any {
	original := reflect.ValueOf(function)
	return reflect.MakeFunc(original.Type(), func(args []reflect.Value) []reflect.Value {
		if isDeterministic(name, args) {
			return original.Call(args)
		}
		c.generates = true
		if !c.ofMember {
			panic(errGenerates) // the template engine returns it as an error
		}
		key := c.key(name, args)
		results := make([]reflect.Value, original.Type().NumOut())
		for i := range results {
			results[i] = reflect.Zero(original.Type().Out(i))
		}
		kept, ok := c.used[key] // the template is executed once more
		if !ok {
			kept, ok = c.kept[key]
		}
		if !ok {
			results = original.Call(args)
			if last := results[len(results)-1]; len(results) > 1 && !last.IsNil() {
				return results
			}
			var err error
			if kept, err = json.Marshal(results[0].Interface()); err != nil {
				panic(fmt.Errorf("keep the result of %s: %w", name, err))
			}
		}
		// The first rendering gets what all later ones get, for instance a time without a monotonic clock.
		result := reflect.New(original.Type().Out(0))
		if err := json.Unmarshal(kept, result.Interface()); err != nil {
			panic(fmt.Errorf("read the kept result of %s: %w", name, err))
		}
		c.used[key] = kept
		results[0] = result.Elem()
		return results
	}).Interface()
}

// key names a call. The arguments may be secret: only their digest is part of it.
func (c *calls) key(function string, args []reflect.Value) string {
	values := make([]any, 0, len(args))
	for _, arg := range args {
		values = append(values, arg.Interface())
	}
	raw, err := json.Marshal(values)
	if err != nil {
		raw = fmt.Append(nil, values...) // a number that JSON does not have
	}
	current := c.templates[len(c.templates)-1]
	call := fmt.Sprintf("%s %s %x", current.path, function, sha256.Sum256(raw))
	number := current.counts[call]
	current.counts[call]++
	return fmt.Sprintf("%s %d", call, number)
}

// isDeterministic returns whether the arguments alone decide the result of a function. Those that format a time take the current one for
// an argument that is none; durationRound takes the time since a time.
func isDeterministic(function string, args []reflect.Value) bool {
	isTime := func(arg reflect.Value) bool {
		switch arg.Interface().(type) {
		case time.Time, *time.Time, int, int32, int64:
			return true
		}
		return false
	}
	switch function {
	case "date", "dateInZone", "date_in_zone", "htmlDate", "htmlDateInZone":
		return slices.ContainsFunc(args, isTime)
	case "durationRound":
		_, isTime := args[0].Interface().(time.Time)
		return !isTime
	}
	return false
}

// sortedKeys is keys of Sprig, which returns them in another order at every call.
func sortedKeys(dicts ...map[string]any) []string {
	all := []string{}
	for _, dict := range dicts {
		all = append(all, slices.Sorted(maps.Keys(dict))...)
	}
	return all
}

// sortedValues is values of Sprig, in the order of their keys.
func sortedValues(dict map[string]any) []any {
	all := make([]any, 0, len(dict))
	for _, key := range sortedKeys(dict) {
		all = append(all, dict[key])
	}
	return all
}

// markTemplates makes all templates of a chart say where they begin and end, so that the results of one template do not depend on the
// calls of others. A template that others include, as they do for a checksum, has the same results there.
func markTemplates(chart *helmchart.Chart) {
	for _, file := range chart.Templates {
		name := path.Join(chart.ChartFullPath(), file.Name)
		if strings.HasPrefix(path.Base(name), "_") {
			continue
		}
		file.Data = fmt.Appendf(nil, "{{ %s %q }}%s{{ %s }}", beginTemplate, name, file.Data, endTemplate)
	}
	for _, sub := range chart.Dependencies() {
		markTemplates(sub)
	}
}
