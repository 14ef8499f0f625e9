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
)

// Generated holds the results of the non-deterministic template functions of a release as JSON: randAlphaNum, genCA,
// now and similar functions, and lookup. The key identifies the call: the template, the function, a digest of the
// arguments, and the number of the call. The key of a lookup has the inputs and the operation instead of the template:
// while both are equal, the result is used again. Otherwise lookup would find the objects of the release itself after
// the installation, and that alone would upgrade the release.
//
// For a member that the hub cannot read, Generated also holds the Secrets and ConfigMaps of the deployed rendering that
// its templates look up. Their key identifies the arguments of lookup. WithPending adds the objects of a rendering that
// is not deployed yet.
type Generated map[string]json.RawMessage

// AfterRendering returns the results to store after a rendering for which g was stored and which used the results in
// used: used, and the generated values of g. It drops the results of lookup and the rendered objects that only g has.
func (g Generated) AfterRendering(used Generated) Generated {
	all := g.WithoutLookup()
	maps.Copy(all, used)
	return all
}

// WithoutLookup returns a copy of g without the results of lookup and without rendered objects.
func (g Generated) WithoutLookup() Generated {
	return g.without(lookupPrefix, renderedPrefix, pendingKey)
}

// WithoutRendered returns a copy of g without rendered objects.
func (g Generated) WithoutRendered() Generated { return g.without(renderedPrefix, pendingKey) }

func (g Generated) without(prefixes ...string) Generated {
	rest := make(Generated, len(g))
	for key, result := range g {
		if !slices.ContainsFunc(prefixes, func(prefix string) bool { return strings.HasPrefix(key, prefix) }) {
			rest[key] = result
		}
	}
	return rest
}

// size returns the size of the keys and the results in bytes.
func (g Generated) size() int {
	size := 0
	for key, result := range g {
		size += len(key) + len(result)
	}
	return size
}

// errMemberSpecific ends a rendering for all members when a template generates a value.
var errMemberSpecific = errors.New("its result depends on the member")

// markTemplates inserts calls of these functions at the beginning and the end of each template.
const (
	beginTemplate = "towlineBeginTemplate"
	endTemplate   = "towlineEndTemplate"
)

// templateFunctions provides the non-deterministic template functions of one rendering.
type templateFunctions struct {
	// forMember is true if the rendering is for one member. Otherwise functions must not generate values, and lookup
	// finds nothing.
	forMember bool
	// stored has the results of former renderings, and used the results that this rendering uses.
	stored, used Generated
	// lookup reads the member. If it is nil, the stored objects of the last rendering answer the lookups.
	lookup LookupFunc
	// inputs is a digest of the chart, the values and the options, and the LookupAccount. operation is "install" or
	// "upgrade".
	inputs, operation string
	// lookedUp has the calls of the template function lookup. If the field lookup is nil, it has only storable calls.
	// lookupErr is the last error of lookup.
	lookedUp  map[lookupCall]bool
	lookupErr error
	// needsMember is true if a template called a function that needs forMember.
	needsMember bool
	// memberSpecific and unanswered become the fields of Release.
	memberSpecific, unanswered bool
	// templates is the stack of the templates that are executed now.
	templates []templateExecution
}

// newSharedFunctions returns the functions of a rendering for all members.
func newSharedFunctions() *templateFunctions {
	return &templateFunctions{lookedUp: map[lookupCall]bool{}}
}

// newMemberFunctions returns the functions of a rendering for one member. The parameters are fields of the result.
func newMemberFunctions(stored Generated, lookup LookupFunc, inputs string, isUpgrade bool) *templateFunctions {
	operation := "install"
	if isUpgrade {
		operation = "upgrade"
	}
	return &templateFunctions{
		forMember: true, stored: stored, used: Generated{}, lookup: lookup, inputs: inputs, operation: operation,
		lookedUp: map[lookupCall]bool{},
	}
}

// templateExecution is one execution of a template.
type templateExecution struct {
	path   string
	counts map[string]int // of equal calls
}

// resultsToStore returns the results for Release.Generated. isComplete is false if the results of lookup are omitted,
// because they are too large.
func (c *templateFunctions) resultsToStore() (results Generated, isComplete bool) {
	others := c.used.WithoutLookup()
	if c.lookup != nil && c.used.size()-others.size() > maxLookup {
		return others, false
	}
	if c.lookup == nil {
		// An upgrade also keeps the results of the installation: if the ConfigurationGroup is lost, the hub renders the
		// installation again and needs them.
		sameInputs := lookupPrefix + c.inputs + " "
		for key, result := range c.stored {
			if strings.HasPrefix(key, sameInputs) && !strings.HasPrefix(key, sameInputs+c.operation+" ") {
				c.used[key] = result
			}
		}
	}
	return c.used, true
}

// funcMap returns the functions that replace functions of Helm and Sprig.
func (c *templateFunctions) funcMap() template.FuncMap {
	functions := template.FuncMap{
		beginTemplate: func(path string) string {
			c.templates = append(c.templates, templateExecution{path: path, counts: map[string]int{}})
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
		functions[name] = c.wrapFunction(name, original[name])
	}
	return functions
}

// wrapFunction returns a function that returns the stored result of the same call, or else calls function and stores
// its result.
func (c *templateFunctions) wrapFunction(name string, function any) any {
	original := reflect.ValueOf(function)
	return reflect.MakeFunc(original.Type(), func(args []reflect.Value) []reflect.Value {
		if isDeterministic(name, args) {
			return original.Call(args)
		}
		c.needsMember, c.memberSpecific = true, true
		if !c.forMember {
			panic(errMemberSpecific) // the template engine returns it as an error
		}
		key := c.key(name, args)
		results := make([]reflect.Value, original.Type().NumOut())
		for i := range results {
			results[i] = reflect.Zero(original.Type().Out(i))
		}
		stored, ok := c.used[key] // the template is executed again in this rendering
		if !ok {
			stored, ok = c.stored[key]
		}
		if !ok {
			results = original.Call(args)
			if last := results[len(results)-1]; len(results) > 1 && !last.IsNil() {
				return results
			}
			var err error
			if stored, err = json.Marshal(results[0].Interface()); err != nil {
				panic(fmt.Errorf("encode the result of %s: %w", name, err))
			}
		}
		// The first rendering decodes its result too, so that it gets the same value as later ones: JSON drops, for example,
		// the monotonic clock.
		result := reflect.New(original.Type().Out(0))
		if err := json.Unmarshal(stored, result.Interface()); err != nil {
			panic(fmt.Errorf("decode the stored result of %s: %w", name, err))
		}
		c.used[key] = stored
		results[0] = result.Elem()
		return results
	}).Interface()
}

// key returns the key of a call in Generated. It has a digest of the arguments, because they can be secret.
func (c *templateFunctions) key(function string, args []reflect.Value) string {
	values := make([]any, 0, len(args))
	for _, arg := range args {
		values = append(values, arg.Interface())
	}
	raw, err := json.Marshal(values)
	if err != nil {
		raw = fmt.Append(nil, values...) // a number that JSON cannot represent, for example NaN
	}
	current := c.templates[len(c.templates)-1]
	call := fmt.Sprintf("%s %s %x", current.path, function, sha256.Sum256(raw))
	number := current.counts[call]
	current.counts[call]++
	return fmt.Sprintf("%s %d", call, number)
}

// isDeterministic returns whether the result of a function depends only on its arguments. Functions that format a time
// use the current time if the argument is not a time. durationRound of a time is the duration until now.
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

// sortedKeys replaces Sprig's keys, whose order is random.
func sortedKeys(dicts ...map[string]any) []string {
	all := []string{}
	for _, dict := range dicts {
		all = append(all, slices.Sorted(maps.Keys(dict))...)
	}
	return all
}

// sortedValues replaces Sprig's values. It returns the values in the order of their keys.
func sortedValues(dict map[string]any) []any {
	all := make([]any, 0, len(dict))
	for _, key := range sortedKeys(dict) {
		all = append(all, dict[key])
	}
	return all
}

// markTemplates inserts beginTemplate and endTemplate into all templates of a chart. So the keys of the calls in a
// template do not depend on other templates, and a template that another one includes, for example for a checksum, has
// the same results there.
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
